"""What was read of a large file leaves the page cache again.

The cache of a file that is read once is a second copy in the memory that may be short: under the
limit of a control group it counts as the process's own, and is only given back under pressure. The
file of a small part of the memory stays cached, so that reading it again is quick. Direct reads
would leave nothing either, but are half as fast here (1.8 of 3.7 GB/s): the system reads ahead
while a checksum is taken.
"""

from __future__ import annotations

import os

from outsize.hardware import host

LARGE = 0.25  # of the memory that this process may hold
SMALL = 64 << 20  # bytes up to which nobody asks how much that is
AHEAD = 16 << 20  # bytes that the system may have read ahead, 8 MiB here


def is_large(size: int) -> bool:
    """Whether a file of so many bytes should not stay in the page cache."""
    return size > SMALL and size > LARGE * host.memory().total


def let_go(fd: int, at: int) -> None:
    """What of a file lies before byte `at` leaves the page cache, and so does what lies far behind:
    what the system read ahead of another tensor. Where nothing is cached this costs nothing."""
    os.posix_fadvise(fd, 0, at, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, at + AHEAD, 0, os.POSIX_FADV_DONTNEED)
