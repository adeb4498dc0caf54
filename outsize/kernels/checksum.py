"""Checksums of bytes at rest: one native pass at the speed of memory, without the interpreter's
lock; zlib's CRC-32 where there is no compiler.

They protect from disks and cables, not from people, and mean something only in the process that
made them: which of the two is used depends on the machine.
"""

from __future__ import annotations

import ctypes
import zlib

from outsize.kernels import native

WORD = 8  # bytes


def checksum(address: int, nbytes: int) -> int:
    """A number below 2^64 of nbytes from an address on; both are multiples of WORD.

    Any one altered word is seen for certain, other damage but for one case in 2^64 (2^32 by CRC).
    One core of the reference machine passes 30 GB/s, the speed of its memory (100 GB/s where the
    bytes are in its cache); CRC-32 2 to 6.
    """
    assert address % WORD == 0 and nbytes % WORD == 0, (address, nbytes)
    library = native.library()
    if library is not None:
        found: int = library.outsize_checksum(address, nbytes // WORD)
        return found
    return plain_checksum(address, nbytes)


def plain_checksum(address: int, nbytes: int) -> int:
    """The same service from the standard library; other numbers."""
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
