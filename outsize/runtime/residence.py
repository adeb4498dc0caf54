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

from outsize.collectives import Lone
from outsize.errors import OutsizeError, nearest
from outsize.memory import Chunk
from outsize.memory.chunk import Account
from outsize.memory.store import MemoryStore, Place, Store, pool, rounded
from outsize.plan import DEVICE
from outsize.runtime.peers import Peers
from outsize.runtime.placement import GRADIENTS, MASTER, PARAMETERS, Piece, Placement, Span
from outsize.schedule import Action, Kind, State
from outsize.schedule.residency import Item, item, moved, overlap

NO_STORES: Mapping[str, Store] = {}


@dataclass(frozen=True)
class Home:
    """Where a state rests below the device."""

    store: Store
    place: Place
    dtype: torch.dtype


class Residence:
    """Makes the chunks of a placement and moves what rests below.

    account: the ledger's way to say which kind a buffer is. peers: the workers with which states
    are shared.
    """

    def __init__(
        self,
        placement: Placement,
        stores: Mapping[str, Store],
        device: torch.device,
        account: Account,
        peers: Peers | None = None,
    ) -> None:
        self.placement, self.device = placement, device
        self.peers = peers or Peers(Lone(), placement)
        self.homes = dict(self._homes(stores))
        # Optimizer states begin as zeros, which need not be written to be read.
        self._zero = {
            (piece.chunk, what, piece.first)
            for pieces in placement.pieces.values()
            for piece in pieces
            if piece.first < piece.last
            for what in placement.states_of(piece.chunk)
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
                first, last = placement.extent(index, what)
                place = stores[tier].reserve((last - first) * dtype.itemsize)
                yield (index, what), Home(stores[tier], place, dtype)

    def make(self, index: int) -> Chunk:
        """Make the next chunk: its buffers, or its views of the pool."""
        chunk = self._chunk(index)
        self.chunks.append(chunk)
        return chunk

    def _chunk(self, index: int) -> Chunk:
        placement, table = self.placement, self.placement.tables[index]
        flats: dict[str, Tensor] = {}
        shards: dict[str, Tensor] = {}
        for what, dtype in placement.held(index):
            if placement.tier(index, what) == DEVICE:
                kind = what if what in (PARAMETERS, GRADIENTS, MASTER) else "optimizer"
                first, last = placement.extent(index, what)
                cut = what in (PARAMETERS, GRADIENTS) and placement.passes(index, what)
                with self._account(kind):
                    made = _made(what, last - first, dtype, self.device)
                    (shards if cut else flats)[what] = made
        stage = placement.stage_of[table.segment]
        for state in (State.PARAMETERS, State.GRADIENTS):
            name = item(state, stage)
            if name in placement.rooms:
                flats |= {s.what: self.view(name, s) for s in self._spans(name, index)}
        states = {n: flats[n] for n in placement.states_of(index) if n in flats}
        gradients, master = flats.get(GRADIENTS), flats.get(MASTER)
        return Chunk(table, flats[PARAMETERS], gradients, master, states, shards=shards)

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

    def gather(self, name: Item) -> None:
        """Bring an item into its room from the workers that have parts of it. Blocks."""
        for span in self.placement.spans[name]:
            mine = self.chunks[span.chunk].shards[span.what]
            self.peers.gather(span.chunk, mine, self.view(name, span))

    def reduce(self, stage: int, last: bool) -> None:
        """Sum a stage's gradients over the workers. last: nothing will be added in this step."""
        for index in self.placement.chunks_of[stage]:
            if self.chunks[index].gradients is not None:
                self.peers.reduce(index, self.chunks[index], last)

    def merge(self, stage: int) -> None:
        """Sum a stage's gradients over the workers of a pipeline that have it."""
        for index in self.placement.chunks_of[stage]:
            gradients = self.updated_gradients(index)
            if gradients is not None:
                self.peers.merge(index, gradients)

    def collect(self, stage: int) -> None:
        """Have a stage's updated parameters from the workers that updated them."""
        for index in self.placement.chunks_of[stage]:
            if self.chunks[index].gradients is not None:
                self.peers.collect(index, self.chunks[index])

    def fetch(self, name: Item) -> None:
        """Bring an item into its room. Blocks; any thread."""
        for span in self.placement.spans[name]:
            if not span.load or not span.bytes:
                continue
            if (span.chunk, span.what, span.first) in self._zero:
                self.view(name, span).zero_()
                continue
            home = self.homes[span.chunk, span.what]
            home.store.read(home.place, self.view(name, span), self._at(span))

    def evict(self, name: Item) -> None:
        """Write an item back from its room. Blocks; any thread."""
        for span in self.placement.spans[name]:
            if span.store and span.bytes:
                self._write(span, self.view(name, span))

    def _write(self, span: Span, data: Tensor) -> None:
        home = self.homes[span.chunk, span.what]
        home.store.write(home.place, data, self._at(span))
        self._zero.discard((span.chunk, span.what, span.first))

    def _at(self, span: Span) -> int:
        """Where a span begins in its place on a tier, in bytes."""
        first, _ = self.placement.extent(span.chunk, span.what)
        return (span.first - first) * span.dtype.itemsize

    def ensure(self, start: frozenset[Item]) -> None:
        """Have what a schedule expects to find when it begins."""
        rooms = self.placement.rooms
        for name in sorted(start - self.present):
            lost = {other for other in self.present if overlap(rooms[other], rooms[name])}
            self.present = self.present - lost
            self._bring(name)
            self.present |= {name}
        self.present = start

    def _bring(self, name: Item) -> None:
        gathered = int(name.split()[1]) in self.placement.residency.gathered
        (self.gather if gathered else self.fetch)(name)

    def forget(self) -> None:
        """Nothing in the pool can be relied on any more."""
        self.present = frozenset()

    def updated_gradients(self, index: int) -> Tensor | None:
        """Of a chunk's gradients those that this worker updates with."""
        chunk = self.chunks[index]
        held = chunk.shards.get(GRADIENTS, chunk.gradients)
        if held is None:
            return None
        base = self.placement.extent(index, GRADIENTS)[0] if GRADIENTS in chunk.shards else 0
        first, last = self.placement.extent(index, MASTER)
        return held[first - base : last - base]

    # -- whole states, for checkpoints ----------------------------------------------------------

    def has(self, chunk: int, what: str) -> bool:
        """Whether a chunk has such a state."""
        return any(name == what for name, _ in self.placement.held(chunk))

    def read(self, chunk: int, what: str) -> Tensor:
        """A whole state of a chunk, 1-D: the buffer itself, or a copy of what rests below or lies
        on several workers, all of which call this."""
        home = self.homes.get((chunk, what))
        if home is None:
            return self.peers.complete(chunk, what, self._buffer(chunk, what))
        base, end = self.placement.extent(chunk, what)
        flat = torch.empty(end - base, dtype=home.dtype)
        for first, last in self._cuts(chunk, what):
            part = flat[first - base : last - base]
            if (chunk, what, first) in self._zero:
                part.zero_()
            else:
                home.store.read(home.place, part, (first - base) * home.dtype.itemsize)
        return self.peers.complete(chunk, what, flat)

    def _cuts(self, chunk: int, what: str) -> Iterator[tuple[int, int]]:
        """What of a state below is read at once: parts, where some may not be written yet."""
        firsts = sorted(f for c, w, f in self._zero if (c, w) == (chunk, what))
        if not firsts:
            yield self.placement.extent(chunk, what)
            return
        stage = self.placement.stage_of[self.placement.tables[chunk].segment]
        pieces = self.placement.pieces[stage]
        yield from ((p.first, p.last) for p in pieces if p.chunk == chunk and p.first < p.last)

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
        cut = (w for w in whats if w not in made and len(self._buffer(chunk, w)) < numel)
        made |= {what: torch.empty(numel, dtype=self._buffer(chunk, what).dtype) for what in cut}
        return {what: made[what] if what in made else self._buffer(chunk, what) for what in whats}

    def resting(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """The states of a piece that rest on tiers of memory, where they rest."""
        for what, dtype in self.placement.held(piece.chunk):
            home = self.homes.get((piece.chunk, what))
            if home is not None:
                assert isinstance(home.store, MemoryStore)
                own = home.store.view(home.place).view(dtype)
                first, _ = self.placement.extent(piece.chunk, what)
                yield what, own[piece.first - first : piece.last - first]
                self._zero.discard((piece.chunk, what, piece.first))

    def write(self, chunk: int, what: str, flat: Tensor) -> None:
        """Replace a whole state of a chunk; a buffer that `read` gave out needs no writing."""
        home = self.homes.get((chunk, what))
        if flat is not (None if home else self._buffer(chunk, what)):
            flat = flat[slice(*self.placement.extent(chunk, what))]
        if home is not None:
            home.store.write(home.place, flat)
            self._zero = {key for key in self._zero if key[:2] != (chunk, what)}
            self.forget()
        elif flat is not self._buffer(chunk, what):
            self._buffer(chunk, what).copy_(flat)
            if what in self.chunks[chunk].shards:
                self.forget()

    def _buffer(self, chunk: int, what: str) -> Tensor:
        mine = self.chunks[chunk]
        if what in mine.shards:
            return mine.shards[what]
        if what in mine.optimizer:
            return mine.optimizer[what]
        flat = {PARAMETERS: mine.parameters, GRADIENTS: mine.gradients, MASTER: mine.master}[what]
        assert flat is not None
        return flat


def transfer(residence: Residence, action: Action, last: bool) -> None:
    """Carry out an action that moves states. last: of a REDUCE, the stage's last of the step."""
    match action.kind:
        case Kind.FETCH:
            residence.fetch(moved(action))
        case Kind.GATHER:
            residence.gather(moved(action))
        case Kind.EVICT:
            residence.evict(moved(action))
        case Kind.REDUCE:
            residence.reduce(action.stage, last)
        case Kind.MERGE:
            residence.merge(action.stage)
        case Kind.COLLECT:
            residence.collect(action.stage)
        case _:
            raise AssertionError(f"{action} moves no state")


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
