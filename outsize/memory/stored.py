"""Bytes of files as they lie, read past the page cache into buffers: nothing is copied beforehand.

What is wanted of several files is cut into operations of aligned spans, which a team of threads
reads directly (`O_DIRECT`) into buffers made once, and hands out from there. Neighbours in a file
share operations, so that small tensors cost no requests of their own. The page cache is not used:
it would hold a second copy of bytes in the memory that is short.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION, THREADS
from outsize.memory.store import ALIGN, Counts, move, pool, rounded

STAGING = THREADS * OPERATION  # bytes of memory that a reader holds, where there is enough
_SMALL = 64 << 10  # bytes of an operation below which fewer threads read at once


@dataclass(frozen=True)
class Copy:
    """bytes of a file, from `start` on, that belong at byte `to` of a buffer."""

    path: Path
    start: int
    to: int
    bytes: int

    @property
    def stop(self) -> int:
        return self.start + self.bytes


@dataclass(frozen=True)
class Operation:
    """One read: [start, stop) of a file, start a multiple of ALIGN, and what it holds."""

    path: Path
    start: int
    stop: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Buffers:
    """Memory to read through: `count` buffers, a thread each, of `bytes` each, whole blocks."""

    count: int = THREADS
    bytes: int = OPERATION

    @property
    def total(self) -> int:
        return self.count * self.bytes


def buffers_of(total: int) -> Buffers:
    """Of `total` bytes together at most, of STAGING; two blocks at least."""
    total = min(max(total, 2 * ALIGN), STAGING)
    count = max(1, min(THREADS, total // _SMALL))
    return Buffers(count, total // count // ALIGN * ALIGN)


WHOLE = Buffers()


def operations(copies: Iterable[Copy], most: int = OPERATION) -> tuple[Operation, ...]:
    """The reads that carry these copies out, each at most `most` bytes."""
    made: list[Operation] = []
    for run in _runs(sorted(copies, key=lambda c: (c.path, c.start, c.to))):
        begin = run[0].start // ALIGN * ALIGN
        end = max(copy.stop for copy in run)
        for start in range(begin, end, most):
            stop = min(start + most, end)
            inside = tuple(clipped(copy, start, stop) for copy in run)
            made.append(Operation(run[0].path, start, stop, tuple(c for c in inside if c.bytes)))
    return tuple(made)


def _runs(ordered: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Copies that lie in one stretch of a file, but for gaps no wider than a block."""
    run: list[Copy] = []
    for copy in ordered:
        if not copy.bytes:
            continue
        if run and (copy.path != run[0].path or copy.start > run[-1].stop + ALIGN):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def clipped(copy: Copy, start: int, stop: int) -> Copy:
    """What of a copy lies in [start, stop); no bytes where nothing does."""
    first, last = max(copy.start, start), min(copy.stop, stop)
    return Copy(copy.path, first, copy.to + first - copy.start, max(0, last - first))


class StoredFiles:
    """Reads files in place. Safe to use from one thread at a time; the files are never written.
    buffers: to read through; no operation may be larger than one.

    OutsizeError for a file that cannot be opened or read, ends before what is wanted of it, or has
    been written since it was opened. One that another has taken the name of is read on.
    """

    def __init__(
        self, paths: Iterable[Path], buffers: Buffers = WHOLE, pinned: bool = False
    ) -> None:
        self.buffers = buffers
        self._counts = Counts("files", 0)
        self._handles: dict[Path, tuple[int, bool]] = {}
        self._written: dict[Path, tuple[int, int]] = {}
        try:
            for path in paths:
                self._handles[path] = _opened(path)
                self._written[path] = _written(self._handles[path][0])
            staging = pool(buffers.total, pinned)
        except BaseException:
            self._let_go()
            raise
        self._idle: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in staging.split(buffers.bytes):
            self._idle.put(buffer)
        self._team = ThreadPoolExecutor(buffers.count, thread_name_prefix="outsize-files")

    @property
    def bytes_read(self) -> int:
        """Payload read so far."""
        return self._counts.read

    def read(self, wanted: Iterable[Operation], out: Tensor) -> None:
        """Carry out reads into `out` (1-D uint8, contiguous, on any device)."""
        parts = deque(wanted)
        paths = {part.path for part in parts}
        team = range(len(parts))[: self.buffers.count]
        work = [self._team.submit(self._work_off, parts, out) for _ in team]
        wait(work)
        for job in work:
            job.result()
        for path in paths:  # afterwards: what is written meanwhile is noticed too
            _check_as_it_was(path, self._written[path], _written(self._handles[path][0]))

    def close(self) -> None:
        """Let the files go. Nothing may be read after."""
        self._team.shutdown()
        self._let_go()

    def _let_go(self) -> None:
        handles: Mapping[Path, tuple[int, bool]] = self._handles
        self._handles = {}
        for handle, _ in handles.values():
            os.close(handle)

    def _work_off(self, parts: deque[Operation], out: Tensor) -> None:
        """One thread's share."""
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            buffer = self._idle.get()
            try:
                self._fill(part, buffer)
                for copy in part.copies:
                    assert copy.to >= 0 and copy.to + copy.bytes <= out.nbytes, (copy, out.nbytes)
                    here = out[copy.to : copy.to + copy.bytes]
                    move(buffer, copy.start - part.start, here, inward=False)
                self._counts.count(read=sum(copy.bytes for copy in part.copies))
            except BaseException:
                parts.clear()  # the others stop as well
                raise
            finally:
                self._idle.put(buffer)

    def _fill(self, part: Operation, buffer: Tensor) -> None:
        handle, direct = self._handles[part.path]
        length, done = part.stop - part.start, 0
        raw = (ctypes.c_char * rounded(length)).from_address(buffer.data_ptr())
        memory = memoryview(raw).cast("B")
        try:
            while done < length:  # what stands behind the end of the file is not there to be read
                got = os.preadv(handle, [memory[done:]], part.start + done)
                if got == 0:
                    raise OutsizeError(
                        f"{part.path} is truncated: it ends at byte {part.start + done:,}, expected"
                        f" {part.stop:,} at least; copy or download it again"
                    )
                done += got
        except OSError as error:
            raise OutsizeError(
                f"{part.path}: reading at byte {part.start + done:,} failed ({error.strerror});"
                " copy the model to another disk"
            ) from None
        if not direct:
            os.posix_fadvise(handle, part.start, length, os.POSIX_FADV_DONTNEED)


def _check_as_it_was(path: Path, then: tuple[int, int], now: tuple[int, int]) -> None:
    """OutsizeError for a file of which what has been read may be of two."""
    if now[1] < then[1]:
        raise OutsizeError(
            f"{path} is truncated: it ends at byte {now[1]:,}, expected {then[1]:,}; copy or"
            " download it again"
        )
    if now != then:
        raise OutsizeError(
            f"{path} has been written since it was opened, so what was read may be of two models;"
            " start again, and put another model beside it, or in its place by renaming"
        )


def _written(handle: int) -> tuple[int, int]:
    """When an open file was written last, and its bytes."""
    found = os.fstat(handle)
    return found.st_mtime_ns, found.st_size


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor and whether it passes the page cache by."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return os.open(path, flags), False  # memory file systems, some network ones
    except OSError as error:
        raise OutsizeError(f"cannot read {path}: {error.strerror}") from None
