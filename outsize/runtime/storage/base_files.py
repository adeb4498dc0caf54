"""BaseFiles: frozen weights that are read in the files of their model, of which no copy is made.

A store that is never written. A chunk has a place on it where all of its parameters lie in the
files in rows as they are here, in the same type or in a narrower one: bfloat16 and float16 are
read into the end of the room and widened from there, which is exact. Codes are read as codes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from outsize.checkpoint.hub import Described
from outsize.checkpoint.shards import fingerprint
from outsize.errors import OutsizeError
from outsize.memory import ChunkTable
from outsize.memory.chunk import Slot
from outsize.memory.store import Place, pool, rounded
from outsize.memory.stored import Copy, Operation, StoredFiles, buffers_of, clipped, operations
from outsize.models.build import rest
from outsize.models.cuts import Cut
from outsize.plan import FILES
from outsize.runtime.tokens.parts import in_place
from outsize.runtime.tokens.source import SHARE

_PIECE = 1 << 16  # elements that are widened at a time


def lying(found: Described) -> dict[str, torch.dtype]:
    """The parameters of a model that are read as they lie in its files, with their types there."""
    return {n: dtype for n, (dtype, copies) in _every(found).items() if copies}


def _every(found: Described) -> dict[str, tuple[torch.dtype, tuple[Copy, ...]]]:
    """By parameter its type in the files, and where it lies in them; nowhere: it is converted."""
    shapes = {name: tuple(x.shape) for name, x in found.model.named_parameters()}
    made = dict[str, tuple[torch.dtype, tuple[Copy, ...]]]()
    for entry in found.stored:
        dtype = found.entry(entry.theirs[0])[1].dtype
        for name in entry.ours:
            codes = rest(name, dtype) == torch.uint8 != dtype  # they are made of what is there
            where = () if codes else in_place(found, entry, name, Cut(shapes[name]), dtype, 0)
            made[name] = dtype, where
    return made


class BaseFiles:
    """The files of a described model. Safe among threads. OutsizeError where they cannot be read,
    and for bytes that are not those that the directory's checksums are of."""

    name, bytes_written = FILES, 0

    def __init__(self, found: Described, pinned: bool = False) -> None:
        self.directory = found.shards.directory
        self.fingerprint = fingerprint(self.directory)
        self._every = _every(found)
        self.lies = {name: dtype for name, (dtype, copies) in self._every.items() if copies}
        found.shards.verify()
        paths = sorted({copy.path for _, copies in self._every.values() for copy in copies})
        size = sum(copy.bytes for _, copies in self._every.values() for copy in copies)
        self._files = StoredFiles(paths, buffers_of(int(SHARE * size)), pinned)
        self._places = dict[int, tuple[ChunkTable, int]]()
        self._piece = pool(_PIECE * torch.float32.itemsize)
        self._one = threading.Lock()
        self._operations = cache(self._operated)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def reserve(self, nbytes: int) -> Place:
        raise AssertionError("it is never written")

    def write(self, place: Place, data: Tensor, at: int = 0) -> None:
        raise AssertionError("it is never written")

    def place(self, table: ChunkTable, span: tuple[int, int], itemsize: int) -> Place:
        """Where elements of a chunk lie; `itemsize` bytes each as they are here."""
        offset = max((at + rounded(1) for at in self._places), default=0)
        self._places[offset] = table, span[0]
        return Place(offset, (span[1] - span[0]) * itemsize)

    def read(self, place: Place, out: Tensor, at: int = 0) -> None:
        table, first = self._places[place.offset]
        first += at // out.itemsize
        raw = out.view(torch.uint8)
        with self._one:
            self._files.read(self._operations(place.offset, first, len(out), out.dtype), raw)
            for slot, begin, end in _runs(table, first, len(out)):
                if (dtype := self.lies[slot.name]) != out.dtype:
                    self._widen(out[begin - first : end - first], dtype)

    def check(self) -> None:
        """OutsizeError where the files are others than they were in the beginning."""
        if fingerprint(self.directory) != self.fingerprint:
            raise OutsizeError(
                f"{self.directory} has changed since the run began, which reads its weights there;"
                " bring its files back and go on from a checkpoint, or start a new run"
            )

    def close(self) -> None:
        """Let the files go."""
        self._files.close()

    def _operated(
        self, offset: int, first: int, count: int, dtype: torch.dtype
    ) -> tuple[Operation, ...]:
        """The reads of some elements of a chunk, those of narrower ones into the end of their
        rooms."""
        copies = self._copies(self._places[offset][0], first, count, dtype)
        return operations(copies, self._files.buffers.bytes)

    def _copies(
        self, table: ChunkTable, first: int, count: int, dtype: torch.dtype
    ) -> Iterator[Copy]:
        for slot, begin, end in _runs(table, first, count):
            narrow, copies = self._every[slot.name]
            low, high = ((x - slot.offset) * narrow.itemsize for x in (begin, end))
            yield from _within(copies, low, high, (end - first) * dtype.itemsize - high)

    def _widen(self, out: Tensor, dtype: torch.dtype) -> None:
        """Numbers of a narrower type at the end of `out` become those of `out`. What is written
        ends before what is not read yet."""
        size = len(out) * dtype.itemsize
        narrow = out.view(torch.uint8)[out.nbytes - size :].view(dtype)
        for first in range(0, len(out), _PIECE):
            some = narrow[first : first + _PIECE]
            piece = some.clone() if out.device.type != "cpu" else self._copied(some)
            out[first : first + _PIECE].copy_(piece)

    def _copied(self, some: Tensor) -> Tensor:
        """Numbers in memory that is there for this, as the buffers of files are: a plan counts
        neither."""
        address = self._piece.data_ptr()
        ctypes.memmove(address, some.data_ptr(), some.nbytes)
        raw = (ctypes.c_uint8 * some.nbytes).from_address(address)
        return torch.frombuffer(raw, dtype=some.dtype)


def _runs(table: ChunkTable, first: int, count: int) -> Iterator[tuple[Slot, int, int]]:
    """The parameters that elements of a chunk belong to, and which elements."""
    for slot in table.slots:
        begin, end = max(first, slot.offset), min(first + count, slot.offset + slot.numel)
        if begin < end:
            yield slot, begin, end


def _within(copies: Iterable[Copy], low: int, high: int, to: int) -> Iterator[Copy]:
    """What of a parameter's copies belongs to its bytes [low, high), moved by `to`."""
    for copy in copies:
        start = copy.start + max(0, low - copy.to)
        stop = copy.stop - max(0, copy.to + copy.bytes - high)
        if start < stop:
            here = clipped(copy, start, stop)
            yield replace(here, to=here.to + to)
