"""The tier on disk: direct I/O by threads over unnamed files, striped, checked byte for byte.

Every read and write is cut into operations that a team of threads carries out, straight between
the disk and the caller's memory where that is aligned, else through buffers that are made once.
The page cache is not used: it would hold a second copy of bytes that only this process reads, in
the memory that is short. A checksum of each BLOCK stays in RAM, and what is read must match it.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION, THREADS, read_all, write_all
from outsize.kernels.checksum import checksum
from outsize.memory.spill import SpillFile, Stripes, expect, refused
from outsize.memory.store import ALIGN, BLOCK, Counts, Place, check_span, pool, rounded


def staging_bytes(directories: int = 1) -> int:
    """Bytes of memory that a store over so many directories holds beside its payload."""
    return directories * THREADS * OPERATION


@dataclass(frozen=True)
class Part:
    """One operation: bytes [start, start + bytes) of a tensor, at byte `at` of a place."""

    start: int
    at: int
    bytes: int
    staged: bool  # through a buffer


class DiskStore:
    """A tier on disk: one unnamed file in each directory, gone with the process.

    The folders are written in turn, STRIPE bytes each, THREADS operations under way in each. Space
    is taken when it is reserved. After the first error the store refuses everything but close().
    buffers: of OPERATION bytes, for what is not aligned; None: one for each thread.
    Raises OutsizeError where a folder is missing, cannot be written or has no room for its share.
    """

    def __init__(
        self,
        name: str,
        directories: Sequence[Path],
        capacity: int,
        buffers: int | None = None,
        pinned: bool = False,
    ) -> None:
        assert directories, "a tier on disk needs a folder"
        self.name, self._counts = name, Counts(name, capacity)
        self._growing = threading.Lock()
        self._failure: str | None = None
        self._sums: dict[int, list[int | None]] = {}  # by offset of a place, then by block
        self._stripes = Stripes(len(directories))
        self._files: list[SpillFile] = []
        try:
            for folder in directories:
                self._files.append(SpillFile(name, Path(folder)))
            expect(self._files, self._stripes, rounded(capacity))
            self._threads = THREADS * len(directories)
            self.bytes_held = (buffers or self._threads) * OPERATION
            staging = pool(self.bytes_held, pinned, f"tier {name!r}")
        except BaseException:
            self._let_go()
            raise
        self._idle: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        checksum(staging.data_ptr(), ALIGN)  # is compiled now, not within a step
        for buffer in staging.split(OPERATION):
            self._idle.put(buffer)
        self._team = ThreadPoolExecutor(self._threads, thread_name_prefix=f"outsize-{name}")

    @property
    def bytes_read(self) -> int:
        return self._counts.read

    @property
    def bytes_written(self) -> int:
        return self._counts.written

    def reserve(self, nbytes: int) -> Place:
        self._check()
        with self._growing:
            place = self._counts.take(nbytes)
            for index, file in enumerate(self._files):
                file.grow(self._stripes.share(place.offset + rounded(nbytes), index))
        self._sums[place.offset] = [None] * -(-nbytes // BLOCK)
        return place

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        self._check()
        check_span(place, data, at)
        end = _Memory(data)
        parts = deque(cut(data.nbytes, at, end.direct))
        due = deque(part for part in parts if not part.staged)

        def move() -> None:
            self._drain(parts, lambda part: self._put(place, end, part))
            self._drain(due, note)

        def note(part: Part) -> None:
            self._note(place, part, end.address + part.start)

        self._together(min(len(parts), self._threads), move, lambda: self._drain(due, note))
        self._counts.count(written=data.nbytes)

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        self._check()
        check_span(place, out, at)
        end = _Memory(out)
        parts = deque(cut(out.nbytes, at, end.direct))
        team = min(len(parts), self._threads)
        landed = queue.SimpleQueue[Part | None]()  # what nobody compared yet; None: a thread ended

        def fetch(part: Part) -> None:
            self._get(place, end, part)
            if part.staged:
                return  # compared in its buffer
            if landed.qsize() < self._threads:
                landed.put(part)
            else:  # whoever compares is behind
                compare(part)

        def move() -> None:
            try:
                self._drain(parts, fetch)
            finally:
                landed.put(None)

        def compare(part: Part) -> None:
            self._compare(place, part, end.address + part.start)

        def rest() -> None:
            for _ in range(team):
                for part in iter(landed.get, None):
                    compare(part)

        self._together(team, move, rest)
        self._counts.count(read=out.nbytes)

    def close(self) -> None:
        self._failure = f"tier {self.name!r} is closed; open it again before using it"
        self._team.shutdown()
        self._idle = queue.SimpleQueue()
        self._let_go()

    def _let_go(self) -> None:
        while self._files:
            self._files.pop().close()

    def _check(self) -> None:
        if self._failure is not None:
            raise OutsizeError(self._failure)

    def _together(self, team: int, move: Callable[[], None], rest: Callable[[], None]) -> None:
        """Threads move while the caller does the rest; when this returns nothing is under way.

        The caller sums, which would only wait: where threads sum between two operations the disk
        stands still, for some answer only when all that they were given is done (8.0 of 10.3 GB/s
        written; 9.9 this way). One part is moved by the caller: a switch costs more than it saves.
        """
        if team <= 1:
            if team:
                move()
                rest()
            return
        jobs = [self._team.submit(move) for _ in range(team)]
        try:
            rest()
        finally:
            wait(jobs)
        for job in jobs:
            job.result()

    def _drain(self, parts: deque[Part], work: Callable[[Part], None]) -> None:
        """One thread's share: parts as they come, since a job for each would cost a tenth of the
        time of a fast disk."""
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            self._check()
            work(part)

    def _put(self, place: Place, end: _Memory, part: Part) -> None:
        """Write one part; where it goes through a buffer, which others need, its sums as well."""
        with self._buffer(end, part) as address:
            if part.staged:
                end.copy(part, address, inward=True)
                self._note(place, part, address)
            self._move(place.offset + part.at, address, rounded(part.bytes), inward=True)

    def _get(self, place: Place, end: _Memory, part: Part) -> None:
        """Read one part; where it goes through a buffer, it is compared there."""
        with self._buffer(end, part) as address:
            self._move(place.offset + part.at, address, rounded(part.bytes), inward=False)
            if part.staged:
                self._compare(place, part, address)
                end.copy(part, address, inward=False)

    def _note(self, place: Place, part: Part, address: int) -> None:
        """Remember the sums of a part that lies at an address."""
        for block, span in _blocks(part):
            self._sums[place.offset][block] = checksum(address + span.start, len(span))

    def _compare(self, place: Place, part: Part, address: int) -> None:
        """OutsizeError unless the bytes at an address are those that were written."""
        for block, span in _blocks(part):
            expected = self._sums[place.offset][block]
            assert expected is not None, f"block {block} of {place} is read before any write"
            if checksum(address + span.start, len(span)) != expected:
                raise self._failed(self._altered(place.offset + block * BLOCK, len(span)))

    @contextmanager
    def _buffer(self, end: _Memory, part: Part) -> Iterator[int]:
        """The address where the bytes of a part lie: the caller's, or a buffer's for a while."""
        if not part.staged:
            yield end.address + part.start
            return
        buffer = self._idle.get()
        try:
            yield buffer.data_ptr()
        finally:
            self._idle.put(buffer)

    def _move(self, offset: int, address: int, nbytes: int, inward: bool) -> None:
        """Between memory and the files, every piece on its own stripe."""
        for piece in self._stripes.pieces(offset, nbytes):
            memory = memoryview((ctypes.c_char * piece.bytes).from_address(address)).cast("B")
            address += piece.bytes
            file = self._files[piece.file]
            try:
                (write_all if inward else read_all)(file.handle, memory, piece.offset, file.direct)
            except OSError as error:
                doing = "writing to" if inward else "reading from"
                raise self._failed(refused(self.name, doing, file.folder, error)) from None

    def _altered(self, offset: int, nbytes: int) -> str:
        folders = sorted({self._files[p.file].folder for p in self._stripes.pieces(offset, nbytes)})
        return (
            f"tier {self.name!r}: {nbytes:,} bytes at {offset:,} under"
            f" {' and '.join(map(str, folders))} are not those that were written: the disk, its"
            " memory or its cable is failing, or somebody altered the file; go on from the last"
            " checkpoint with a folder on another disk"
        )

    def _failed(self, message: str) -> OutsizeError:
        self._failure = self._failure or message
        return OutsizeError(message)


class _Memory:
    """The bytes of a caller's tensor, on whatever device, held as long as an operation may run."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.address = tensor, tensor.data_ptr()
        self._on_host = tensor.device.type == "cpu"
        self.direct = self._on_host and self.address % ALIGN == 0
        if not self._on_host:  # what was queued there before comes first
            accelerator.settle(tensor.device)

    def copy(self, part: Part, buffer: int, inward: bool) -> None:
        """Between these bytes and a buffer at an address; done when it returns."""
        if self._on_host:
            mine = self.address + part.start
            ctypes.memmove(*((buffer, mine) if inward else (mine, buffer)), part.bytes)
            return
        flat = self._tensor.detach().reshape(-1).view(torch.uint8)
        mine_there = flat[part.start : part.start + part.bytes]
        raw = (ctypes.c_uint8 * part.bytes).from_address(buffer)
        staged = torch.frombuffer(raw, dtype=torch.uint8)
        to, source = (staged, mine_there) if inward else (mine_there, staged)
        to.copy_(source)
        accelerator.settle(self._tensor.device)


def cut(nbytes: int, at: int, direct: bool) -> Iterator[Part]:
    """Operations that carry nbytes to byte `at` of a place.

    Direct I/O moves multiples of ALIGN: where the place ends elsewhere, its last block goes by
    itself through a buffer, and the rest straight from or to the caller's memory.
    """
    tail = 0 if nbytes % ALIGN == 0 else nbytes % BLOCK
    for start in range(0, nbytes - tail, OPERATION):
        yield Part(start, at + start, min(OPERATION, nbytes - tail - start), not direct)
    if tail:
        yield Part(nbytes - tail, at + nbytes - tail, tail, True)


def _blocks(part: Part) -> Iterator[tuple[int, range]]:
    """(index of a block in its place, its bytes within the part, rounded up) of a part."""
    for start in range(0, part.bytes, BLOCK):
        stop = min(start + BLOCK, rounded(part.bytes))
        yield (part.at + start) // BLOCK, range(start, stop)
