"""Bandwidth of a disk, past the page cache: a temporary file written and read directly."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from outsize.errors import OutsizeError
from outsize.hardware.hardware import Rate

SIZE = 256 * 2**20
BLOCK = 8 * 2**20  # page-aligned pieces, as direct I/O asks


def disk_rates(
    directory: str | Path,
    date: str,
    size: int = SIZE,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Rate, Rate]:
    """(read, write) in B/s of the disk under a directory; size bytes are needed for a moment.

    Raises OutsizeError where the directory cannot be written or is full.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".outsize-disk-") as file:
            direct = _takes_direct(file.name)
            write = _timed(file.name, os.O_WRONLY, direct, size, clock)
            read = _timed(file.name, os.O_RDONLY, direct, size, clock)
    except OSError as error:
        raise OutsizeError(
            f"{directory}: cannot measure the disk ({error.strerror}); name a folder that can be "
            f"written, with {size:,} bytes free"
        ) from None
    note = "direct I/O" if direct else "this file system has no direct I/O: synced, cache dropped"
    return (
        Rate(size / read, "B/s", "probe", date, note=note),
        Rate(size / write, "B/s", "probe", date, note=note),
    )


def _takes_direct(name: str) -> bool:
    """Memory file systems and some network ones refuse O_DIRECT."""
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _timed(name: str, mode: int, direct: bool, size: int, clock: Callable[[], float]) -> float:
    """Seconds to move size bytes in blocks, until they are on the disk or in memory."""
    handle = os.open(name, mode | (os.O_DIRECT if direct else 0))
    try:
        with mmap.mmap(-1, BLOCK) as block:  # anonymous maps start at a page
            start = clock()
            for _ in range(size // BLOCK):
                if mode == os.O_WRONLY:
                    os.write(handle, block)
                else:
                    os.readv(handle, [block])
            os.fsync(handle)
            spent = clock() - start
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return spent
    finally:
        os.close(handle)
