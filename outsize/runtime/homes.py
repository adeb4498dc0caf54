"""Homes: where the states of a job rest below the device, read and written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.errors import OutsizeError, nearest
from outsize.memory.store import Addressed, Place, Store
from outsize.plan import DEVICE, FILES
from outsize.runtime.storage.base_files import BaseFiles
from outsize.schedule.items import Piece, Span
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.staying import stays


@dataclass(frozen=True)
class Home:
    """Where a state rests: by runs of its elements, each of which begins a page and a checksum of
    the store."""

    store: Store
    runs: tuple[tuple[int, int, Place], ...]  # first, last, where
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return sum(place.bytes for _, _, place in self.runs)

    def at(self, first: int) -> tuple[Place, int]:
        """The place of an element, and the byte in it at which the element begins."""
        begin, _, place = next(run for run in self.runs if run[0] <= first < run[1])
        return place, (first - begin) * self.dtype.itemsize


class Homes:
    """The homes of a placement by chunk and state. Optimizer states begin with one value, which
    need not be written to be read."""

    def __init__(self, placement: Placement, stores: Mapping[str, Store]) -> None:
        self._chunks, self._pieces = placement.chunks, placement.items.pieces
        self.known = dict(self._reserved(placement, stores))
        self._fresh = {
            (piece.chunk, spec.name, self._own(piece, spec.name)[0]): spec.initial
            for pieces in self._pieces.values()
            for piece in pieces
            if piece.first < piece.last
            for spec in self._chunks.kept.specs(self._chunks.tables[piece.chunk])
        }

    def _reserved(
        self, placement: Placement, stores: Mapping[str, Store]
    ) -> Iterator[tuple[tuple[int, str], Home]]:
        for index, table in enumerate(self._chunks.tables):
            for what, dtype in self._chunks.held(index):
                tier = self._chunks.tier(index, what)
                if tier == DEVICE or (what == GRADIENTS and not placement.leaves(table.segment)):
                    continue
                if what == PARAMETERS and stays(self._chunks, index):
                    files, span = stores[FILES], self._chunks.share(index, what)
                    assert isinstance(files, BaseFiles)
                    place = files.place(table, span, dtype.itemsize)
                    yield (index, what), Home(files, ((*span, place),), dtype)
                    continue
                if tier not in stores:
                    raise OutsizeError(
                        f"plan: {what} rest on the tier {tier!r}{nearest(tier, tuple(stores))}"
                    )
                runs = tuple(
                    (first, last, stores[tier].reserve((last - first) * dtype.itemsize))
                    for first, last in self._runs(index, what)
                )
                yield (index, what), Home(stores[tier], runs, dtype)

    def _runs(self, chunk: int, what: str) -> Iterator[tuple[int, int]]:
        """What of a state has a place of its own: all of it where parts of the update begin a
        checksum in it, as in states of the weights' size, else each part."""
        if self._chunks.kept.spec(self._chunks.tables[chunk], what).shaped:
            yield self._chunks.share(chunk, what)
        else:
            yield from self._parts(chunk, what)

    def _parts(self, chunk: int, what: str) -> Iterator[tuple[int, int]]:
        """Of a state's own elements those of each part of the update."""
        for piece in self._pieces[self._chunks.stage_of[self._chunks.tables[chunk].segment]]:
            if piece.chunk == chunk and piece.first < piece.last:
                yield self._own(piece, what)

    def _own(self, piece: Piece, what: str) -> tuple[int, int]:
        """Of a state's own elements those of a piece."""
        return self._chunks.within(piece.chunk, what, piece.first, piece.last)

    def fetch(self, span: Span, out: Tensor) -> None:
        """Read a span of an item. Blocks; any thread."""
        self._read(span.chunk, span.what, span.first, out)

    def _read(self, chunk: int, what: str, first: int, out: Tensor) -> None:
        initial = self._fresh.get((chunk, what, first))
        if initial is not None:
            out.fill_(initial)
        elif len(out):
            home = self.known[chunk, what]
            place, at = home.at(first)
            home.store.read(place, out, at)

    def evict(self, span: Span, data: Tensor) -> None:
        """Write a span of an item, but for what stays in files. Blocks; any thread."""
        if span.what == PARAMETERS and stays(self._chunks, span.chunk):
            return
        home = self.known[span.chunk, span.what]
        place, at = home.at(span.first)
        home.store.write(place, data, at)
        self._fresh.pop((span.chunk, span.what, span.first), None)

    def read(self, chunk: int, what: str) -> Tensor:
        """A copy of what this worker has of a state, 1-D: in parts, where some may not be written
        yet."""
        home = self.known[chunk, what]
        base, end = self._chunks.share(chunk, what)
        flat = torch.empty(end - base, dtype=home.dtype)
        fresh = any(key[:2] == (chunk, what) for key in self._fresh)
        cuts = self._parts(chunk, what) if fresh else (run[:2] for run in home.runs)
        for first, last in cuts:
            self._read(chunk, what, first, flat[first - base : last - base])
        return flat

    def write(self, chunk: int, what: str, flat: Tensor) -> None:
        """Replace what this worker has of a state."""
        home, base = self.known[chunk, what], self._chunks.share(chunk, what)[0]
        for first, last, place in home.runs:
            home.store.write(place, flat[first - base : last - base])
        fresh = self._fresh.items()
        self._fresh = {key: value for key, value in fresh if key[:2] != (chunk, what)}

    def resting(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """The states of a piece that rest on tiers of memory, where they rest."""
        for what, dtype in self._chunks.held(piece.chunk):
            home = self.known.get((piece.chunk, what))
            if home is not None:
                assert isinstance(home.store, Addressed)
                first, last = self._own(piece, what)
                if first == last:  # others have a part more
                    yield what, torch.empty(0, dtype=dtype)
                    continue
                place, at = home.at(first)
                begin = at // dtype.itemsize
                own = home.store.view(place).view(dtype)[begin : begin + last - first]
                initial = self._fresh.pop((piece.chunk, what, first), None)
                if initial:  # the store's bytes are zeros
                    own.fill_(initial)
                yield what, own
