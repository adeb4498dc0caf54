"""Residence: the bytes of a job's states, on the device, in the pool's rooms and on tiers.

Every state has one home. What is held on the device is a buffer of its own, as it is where nothing
streams; what rests below has a place on a store, and where it passes through the pool a room that
never moves, so that parameters and gradients are the same views in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.errors import OutsizeError, nearest
from outsize.memory import Chunk
from outsize.memory.chunk import Account
from outsize.memory.store import MemoryStore, Place, Store, pool, rounded
from outsize.plan import DEVICE
from outsize.runtime.placement import GRADIENTS, MASTER, PARAMETERS, Piece, Placement, Span
from outsize.schedule import State
from outsize.schedule.residency import Item, item, overlap

NO_STORES: Mapping[str, Store] = {}


@dataclass(frozen=True)
class Home:
    """Where a state rests below the device."""

    store: Store
    place: Place
    dtype: torch.dtype


class Residence:
    """Makes the chunks of a placement and moves what rests below.

    account: the ledger's way to say which kind a buffer is.
    """

    def __init__(
        self,
        placement: Placement,
        stores: Mapping[str, Store],
        device: torch.device,
        account: Account,
    ) -> None:
        self.placement, self.device = placement, device
        self.homes = dict(self._homes(stores))
        # Optimizer states begin as zeros, which need not be written to be read.
        self._zero = {
            (piece.chunk, what, piece.first)
            for pieces in placement.pieces.values()
            for piece in pieces
            for what in placement.states
        }
        with account("window"):
            self.pool = _pool(placement.pool, device)
        self.present: frozenset[Item] = frozenset()
        self.chunks: list[Chunk] = []
        self._account = account

    # -- construction ---------------------------------------------------------------------------

    def _homes(self, stores: Mapping[str, Store]) -> Iterator[tuple[tuple[int, str], Home]]:
        placement = self.placement
        for index, table in enumerate(placement.tables):
            for what, dtype in placement.held(index):
                tier = placement.tier(index, what)
                if tier == DEVICE or (what == GRADIENTS and not placement.leaves(table.segment)):
                    continue
                if tier not in stores:
                    raise OutsizeError(
                        f"plan: {what} rest on the tier {tier!r}{nearest(tier, tuple(stores))}"
                    )
                place = stores[tier].reserve(table.numel * dtype.itemsize)
                yield (index, what), Home(stores[tier], place, dtype)

    def make(self, index: int) -> Chunk:
        """Make the next chunk: its buffers, or its views of the pool."""
        chunk = self._chunk(index)
        self.chunks.append(chunk)
        return chunk

    def _chunk(self, index: int) -> Chunk:
        placement, table = self.placement, self.placement.tables[index]
        flats: dict[str, Tensor] = {}
        for what, dtype in placement.held(index):
            if placement.tier(index, what) == DEVICE:
                kind = what if what in (PARAMETERS, GRADIENTS, MASTER) else "optimizer"
                with self._account(kind):
                    flats[what] = _made(what, table.numel, dtype, self.device)
        stage = placement.stage_of[table.segment]
        for state in (State.PARAMETERS, State.GRADIENTS):
            name = item(state, stage)
            if name in placement.rooms:
                flats |= {s.what: self.view(name, s) for s in self._spans(name, index)}
        states = {n: flats[n] for n in placement.states if n in flats}
        return Chunk(table, flats[PARAMETERS], flats.get(GRADIENTS), flats.get(MASTER), states)

    def _spans(self, name: Item, chunk: int) -> Iterator[Span]:
        return (span for span in self.placement.spans[name] if span.chunk == chunk)

    # -- the pool -------------------------------------------------------------------------------

    def view(self, name: Item, span: Span) -> Tensor:
        """A span of an item where it lies in the pool, 1-D."""
        begin = self.placement.rooms[name][0] + span.offset
        return self.pool[begin : begin + span.bytes].view(span.dtype)

    def views(self, name: Item) -> dict[str, Tensor]:
        """An item's spans by what they are; of an item whose spans differ in that."""
        return {span.what: self.view(name, span) for span in self.placement.spans[name]}

    def fetch(self, name: Item) -> None:
        """Bring an item into its room. Blocks; any thread."""
        for span in self.placement.spans[name]:
            if not span.load:
                continue
            if (span.chunk, span.what, span.first) in self._zero:
                self.view(name, span).zero_()
                continue
            home = self.homes[span.chunk, span.what]
            home.store.read(home.place, self.view(name, span), span.first * span.dtype.itemsize)

    def evict(self, name: Item) -> None:
        """Write an item back from its room. Blocks; any thread."""
        for span in self.placement.spans[name]:
            if span.store:
                self._write(span, self.view(name, span))

    def _write(self, span: Span, data: Tensor) -> None:
        home = self.homes[span.chunk, span.what]
        home.store.write(home.place, data, span.first * span.dtype.itemsize)
        self._zero.discard((span.chunk, span.what, span.first))

    def ensure(self, start: frozenset[Item]) -> None:
        """Have what a schedule expects to find when it begins."""
        rooms = self.placement.rooms
        for name in sorted(start - self.present):
            lost = {other for other in self.present if overlap(rooms[other], rooms[name])}
            self.present = self.present - lost
            self.fetch(name)
            self.present |= {name}
        self.present = start

    def forget(self) -> None:
        """Nothing in the pool can be relied on any more."""
        self.present = frozenset()

    # -- whole states, for checkpoints ----------------------------------------------------------

    def has(self, chunk: int, what: str) -> bool:
        """Whether a chunk has such a state."""
        return any(name == what for name, _ in self.placement.held(chunk))

    def read(self, chunk: int, what: str) -> Tensor:
        """A whole state of a chunk, 1-D: the buffer itself, or a copy of what rests below."""
        home = self.homes.get((chunk, what))
        if home is None:
            return self._buffer(chunk, what)
        numel = self.placement.tables[chunk].numel
        flat = torch.empty(numel, dtype=home.dtype)
        for first, last in self._cuts(chunk, what):
            if (chunk, what, first) in self._zero:
                flat[first:last] = 0
            else:
                home.store.read(home.place, flat[first:last], first * home.dtype.itemsize)
        return flat

    def _cuts(self, chunk: int, what: str) -> Iterator[tuple[int, int]]:
        """What of a state below is read at once: parts, where some may not be written yet."""
        numel = self.placement.tables[chunk].numel
        firsts = sorted(f for c, w, f in self._zero if (c, w) == (chunk, what))
        if not firsts:
            yield 0, numel
            return
        stage = self.placement.stage_of[self.placement.tables[chunk].segment]
        pieces = self.placement.pieces[stage]
        yield from ((p.first, p.last) for p in pieces if p.chunk == chunk)

    def staged(self, chunk: int, whats: tuple[str, ...]) -> dict[str, Tensor]:
        """Where whole new states of a chunk are made, to be given to `write`: the buffers
        themselves, and for what rests below tensors, in the pool where they fit in it together."""
        numel = self.placement.tables[chunk].numel
        below = {w: self.homes[chunk, w].dtype for w in whats if (chunk, w) in self.homes}
        sizes = {what: rounded(numel * dtype.itemsize) for what, dtype in below.items()}
        if sum(sizes.values()) > self.pool.nbytes:
            made = {what: torch.empty(numel, dtype=dtype) for what, dtype in below.items()}
        else:
            self.forget()
            rooms = self.pool[: sum(sizes.values())].split(list(sizes.values())) if sizes else ()
            made = {
                what: room[: numel * dtype.itemsize].view(dtype)
                for (what, dtype), room in zip(below.items(), rooms, strict=True)
            }
        return {what: made[what] if what in made else self._buffer(chunk, what) for what in whats}

    def resting(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """The states of a piece that rest on tiers of memory, where they rest."""
        for what, dtype in self.placement.held(piece.chunk):
            home = self.homes.get((piece.chunk, what))
            if home is not None:
                assert isinstance(home.store, MemoryStore)
                whole = home.store.view(home.place).view(dtype)
                yield what, whole[piece.first : piece.last]
                self._zero.discard((piece.chunk, what, piece.first))

    def write(self, chunk: int, what: str, flat: Tensor) -> None:
        """Replace a whole state of a chunk; a buffer that `read` gave out needs no writing."""
        home = self.homes.get((chunk, what))
        if home is not None:
            home.store.write(home.place, flat)
            self._zero = {key for key in self._zero if key[:2] != (chunk, what)}
            self.forget()
        elif flat is not self._buffer(chunk, what):
            self._buffer(chunk, what).copy_(flat)

    def _buffer(self, chunk: int, what: str) -> Tensor:
        mine = self.chunks[chunk]
        if what in mine.optimizer:
            return mine.optimizer[what]
        flat = {PARAMETERS: mine.parameters, GRADIENTS: mine.gradients, MASTER: mine.master}[what]
        assert flat is not None
        return flat


def _pool(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu" and nbytes and not _rehearsing():
        return pool(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _rehearsing() -> bool:
    """Whether tensors have no memory here."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(torch.empty(0), FakeTensor)


def _made(what: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    make = torch.empty if what in (PARAMETERS, MASTER) else torch.zeros
    return make(numel, dtype=dtype, device=device)
