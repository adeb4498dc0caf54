"""A disk past the page cache: files without a name, direct reads and writes, and their bandwidth.

What a tier on disk does (`outsize.memory.disk`) and what the probe measures are the same calls in
the same sizes from the same number of threads, so that one can be held against the other.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outsize.errors import OutsizeError
from outsize.hardware.hardware import Rate

# One operation, and how many are under way on one disk. Measured on the reference machine's disk,
# 1 to 8 MiB by 1 to 8 threads: 10.5 to 11.9 GB/s written and 5.2 to 5.8 read, all within 10%. Four
# threads keep the queue of a faster disk filled (8 MiB under way are 1 ms at 8 GB/s).
OPERATION = 2 << 20
THREADS = 4
SIZE = 256 << 20
ROUNDS = 2  # the first write is also the one that converts fresh extents
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def disk_rates(
    directory: str | Path,
    date: str,
    size: int = SIZE,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Rate, Rate]:
    """(read, write) in B/s of the disk under a directory, THREADS operations at a time, the better
    of ROUNDS; size bytes are needed for a moment.

    Raises OutsizeError where the directory cannot be written or is full.
    """
    try:
        handle, direct = open_direct(Path(directory))
        try:
            preallocate(handle, 0, size)
            spent = [_timed(handle, direct, size, clock) for _ in range(ROUNDS)]
        finally:
            os.close(handle)
    except OSError as error:
        raise OutsizeError(
            f"{directory}: cannot measure the disk ({error.strerror}); name a folder that can be "
            f"written, with {size:,} bytes free"
        ) from None
    note = "direct I/O" if direct else "this file system has no direct I/O: synced, cache dropped"
    note += f", {THREADS} operations of {OPERATION >> 20} MiB at a time"
    read, write = min(r for _, r in spent), min(w for w, _ in spent)
    return (
        Rate(size / read, "B/s", "probe", date, note=note),
        Rate(size / write, "B/s", "probe", date, note=note),
    )


def open_direct(folder: Path) -> tuple[int, bool]:
    """A new file in a folder, and whether it bypasses the page cache: memory file systems and some
    network ones refuse O_DIRECT. OSError where the folder takes no file."""
    try:
        return unnamed(folder, os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return unnamed(folder), False


def unnamed(folder: Path, flags: int = 0) -> int:
    """A descriptor, for reading and writing, of a new file without a name: gone with the process,
    whatever ends it. OSError where the folder takes no file."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE or not folder.is_dir():
            raise
    handle, name = tempfile.mkstemp(prefix=".outsize-", dir=folder)  # some network file systems
    try:
        return os.open(name, flags)
    finally:
        os.unlink(name)
        os.close(handle)


def preallocate(handle: int, start: int, size: int) -> None:
    """Take the space of [start, start + size) now. OSError when it is not there.

    A file system that cannot promise space gets a longer file, and is found full when written to.
    """
    try:
        os.posix_fallocate(handle, start, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.truncate(handle, start + size)


def write_all(handle: int, memory: memoryview, offset: int, direct: bool) -> None:
    """All of memory to the file at an offset; blocks. OSError when the system refuses."""
    done = 0
    while done < len(memory):
        done += os.pwritev(handle, [memory[done:]], offset + done)
    if not direct:
        _drop(handle, offset, len(memory))


def read_all(handle: int, memory: memoryview, offset: int, direct: bool) -> None:
    """Fill memory from the file at an offset; blocks. OSError when the system refuses, EIO when the
    file ends before."""
    done = 0
    while done < len(memory):
        got = os.preadv(handle, [memory[done:]], offset + done)
        if got == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += got
    if not direct:
        _drop(handle, offset, len(memory))


def _drop(handle: int, offset: int, size: int) -> None:
    """Out of the page cache: written pages are sent to the disk, clean ones let go."""
    os.posix_fadvise(handle, offset, size, os.POSIX_FADV_DONTNEED)


def _timed(handle: int, direct: bool, size: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds to write, then to read size bytes, until they are on the disk or in memory."""
    with (
        mmap.mmap(-1, THREADS * OPERATION) as region,  # anonymous maps start at a page
        memoryview(region) as memory,
        ThreadPoolExecutor(THREADS) as team,
    ):
        spent = []
        for move in (write_all, read_all):

            def operation(offset: int, move: Callable[..., None] = move) -> None:
                length = min(OPERATION, size - offset)
                first = offset % len(memory)
                move(handle, memory[first : first + length], offset, direct)

            start = clock()
            list(team.map(operation, range(0, size, OPERATION)))
            if move is write_all:
                os.fsync(handle)
            spent.append(clock() - start)
            _drop(handle, 0, size)
    return spent[0], spent[1]
