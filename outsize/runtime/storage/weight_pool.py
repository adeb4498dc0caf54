"""WeightPool: the bytes of a job's states, on the device, in the pool's rooms and on tiers.

Every state has one home. What is held on the device is a buffer of its own, as it is where nothing
streams; what rests below has a place on a store, and where it passes through the pool a room that
never moves, so that parameters and gradients are the same views in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from outsize.collectives import Lone
from outsize.memory import Chunk
from outsize.memory.chunk import Account
from outsize.memory.store import Store, pool, rounded
from outsize.plan import DEVICE
from outsize.runtime.homes import Homes
from outsize.runtime.storage.shard_groups import ShardGroups
from outsize.schedule import State
from outsize.schedule.item import Item
from outsize.schedule.items import Span
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.residency import overlap
from outsize.torch_private import rehearsing

NO_STORES: Mapping[str, Store] = {}


class WeightPool:
    """Makes the chunks of a placement and moves what rests below.

    account: the ledger's way to say which kind a buffer is. shard_groups: the workers with which
    states are shared; where there are none, this worker alone.
    """

    def __init__(
        self,
        placement: Placement,
        stores: Mapping[str, Store],
        device: torch.device,
        account: Account,
        shard_groups: ShardGroups | None = None,
    ) -> None:
        self.placement, self.device = placement, device
        self.shard_groups = shard_groups or ShardGroups(Lone(), placement.chunks)
        self.homes = Homes(placement, stores)
        with account("window"):
            self.pool = pool_on(placement.pool, device)
        self.present: frozenset[Item] = frozenset()
        self.chunks: list[Chunk] = []
        self._updated: dict[int, Tensor | None] = {}
        self._account = account

    # -- construction ---------------------------------------------------------------------------

    def make(self, index: int) -> Chunk:
        """Make the next chunk: its buffers, or its views of the pool."""
        chunk = self._chunk(index)
        self.chunks.append(chunk)
        return chunk

    def _chunk(self, index: int) -> Chunk:
        placement, table = self.placement, self.placement.chunks.tables[index]
        flats: dict[str, Tensor] = {}
        shards: dict[str, Tensor] = {}
        for what, dtype in placement.chunks.held(index):
            if placement.chunks.tier(index, what) == DEVICE:
                kind = what if what in (PARAMETERS, GRADIENTS, MASTER) else "optimizer"
                first, last = placement.chunks.share(index, what)
                cut = what in (PARAMETERS, GRADIENTS) and placement.chunks.passes(index, what)
                with self._account(kind):
                    initial = placement.chunks.kept.spec(table, what).initial
                    made = _made(what, last - first, dtype, self.device, initial)
                    (shards if cut else flats)[what] = made
        stage = placement.chunks.stage_of[table.segment]
        for state in (State.PARAMETERS, State.GRADIENTS):
            name = Item(state, stage)
            if name in placement.rooms:
                flats |= {s.what: self.view(name, s) for s in self._spans(name, index)}
        states = {n: flats[n] for n in placement.chunks.kept.names(table) if n in flats}
        gradients, master = flats.get(GRADIENTS), flats.get(MASTER)
        return Chunk(table, flats[PARAMETERS], gradients, master, states, shards=shards)

    def _spans(self, name: Item, chunk: int) -> Iterator[Span]:
        return (span for span in self.placement.items.spans[name] if span.chunk == chunk)

    # -- the pool -------------------------------------------------------------------------------

    def view(self, name: Item, span: Span) -> Tensor:
        """A span of an item where it lies in the pool, 1-D."""
        begin = self.placement.rooms[name][0] + span.offset
        return self.pool[begin : begin + span.bytes].view(span.dtype)

    def views(self, name: Item) -> dict[str, Tensor]:
        """An item's spans by what they are; of an item whose spans differ in that."""
        return {span.what: self.view(name, span) for span in self.placement.items.spans[name]}

    def gather(self, name: Item) -> None:
        """Bring an item into its room from the workers that have parts of it. Blocks."""
        for span in self.placement.items.spans[name]:
            whole = self.view(name, span)
            mine = self.chunks[span.chunk].shards.get(span.what)
            if mine is None:  # it rests below, and is in its place already
                mine = whole[slice(*self.placement.chunks.share(span.chunk, span.what))]
            self.shard_groups.gather(span.chunk, mine, whole)

    def reduce(self, stage: int, last: bool) -> None:
        """Sum a stage's gradients over the workers. last: nothing will be added in this step."""
        for index in self.placement.chunks.of_stage[stage]:
            if self.chunks[index].gradients is not None:
                self.shard_groups.reduce(index, self.chunks[index], last)

    def merge(self, stage: int) -> None:
        """Sum a stage's gradients over the workers of a pipeline that have it."""
        for index in self.placement.chunks.of_stage[stage]:
            gradients = self.updated_gradients(index)
            if gradients is not None:
                self.shard_groups.merge(index, gradients)

    def collect(self, stage: int) -> None:
        """Have a stage's updated parameters from the workers that updated them."""
        for index in self.placement.chunks.of_stage[stage]:
            if self.chunks[index].gradients is not None:
                self.shard_groups.collect(index, self.chunks[index])

    def fetch(self, name: Item) -> None:
        """Bring an item into its room. Blocks; any thread."""
        items = self.placement.items
        if name.state is State.GRADIENTS and items.residency.shared(name):
            for span in items.spans[name]:  # of the others' shares nothing has been added yet
                self.view(name, span).zero_()
        for span in items.moved(name, fetch=True):
            self.homes.fetch(span, self.view(name, span))

    def evict(self, name: Item) -> None:
        """Write an item back from its room. Blocks; any thread."""
        for span in self.placement.items.moved(name, fetch=False):
            self.homes.evict(span, self.view(name, span))

    def ensure(self, start: frozenset[Item]) -> None:
        """Have what a schedule expects to find when it begins."""
        rooms = self.placement.rooms
        for name in sorted(start - self.present):
            lost = {other for other in self.present if overlap(rooms[other], rooms[name])}
            self.present = self.present - lost
            residency = self.placement.items.residency
            gathered = name.stage in residency.gathered
            if not gathered or residency.shared(name):
                self.fetch(name)
            if gathered:
                self.gather(name)
            self.present |= {name}
        self.present = start

    def forget(self) -> None:
        """Nothing in the pool can be relied on any more."""
        self.present = frozenset()

    def updated_gradients(self, index: int) -> Tensor | None:
        """Of a chunk's gradients those that this worker updates with; always the same tensor."""
        if index not in self._updated:
            chunk, chunks = self.chunks[index], self.placement.chunks
            held = chunk.shards.get(GRADIENTS, chunk.gradients)
            base = chunks.extent(index, GRADIENTS)[0] if GRADIENTS in chunk.shards else 0
            first, last = chunks.extent(index, MASTER)
            self._updated[index] = None if held is None else held[first - base : last - base]
        return self._updated[index]

    # -- whole states, for checkpoints ----------------------------------------------------------

    def read(self, chunk: int, what: str) -> Tensor:
        """A whole state of a chunk, 1-D: the buffer itself, or a copy of what rests below or lies
        on several workers, all of which call this."""
        return self.shard_groups.complete(chunk, what, self.mine(chunk, what))

    def mine(self, chunk: int, what: str) -> Tensor:
        """What this worker has of a state between uses, 1-D: the buffer, or a copy of what rests
        below."""
        below = (chunk, what) in self.homes.known
        return self.homes.read(chunk, what) if below else self._buffer(chunk, what)

    def staged(self, chunk: int, whats: tuple[str, ...]) -> dict[str, Tensor]:
        """Where whole new states of a chunk are made, to be given to `write`: the buffers
        themselves, and for what rests below tensors, in the pool where they fit in it together."""
        numel = self.placement.chunks.numel(chunk, whats[0]) if whats else 0
        homes = self.homes.known
        below = {w: homes[chunk, w].dtype for w in whats if (chunk, w) in homes}
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

    def write(self, chunk: int, what: str, flat: Tensor) -> None:
        """Replace a state of a chunk, by the whole of it or by what this worker has: also by what
        `read` or `mine` gave out, changed."""
        base, end = self.placement.chunks.share(chunk, what)
        mine = flat if len(flat) == end - base else flat[base:end]
        if (chunk, what) in self.homes.known:
            self.homes.write(chunk, what, mine)
            self.forget()
            return
        if mine is not self._buffer(chunk, what):
            self._buffer(chunk, what).copy_(mine)
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


def pool_on(nbytes: int, device: torch.device) -> Tensor:
    """The bytes of a pool, 1-D uint8."""
    if device.type == "cpu" and nbytes and not rehearsing():
        return pool(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _made(
    what: str, numel: int, dtype: torch.dtype, device: torch.device, initial: float
) -> Tensor:
    if what in (PARAMETERS, MASTER):
        return torch.empty(numel, dtype=dtype, device=device)
    made = torch.zeros(numel, dtype=dtype, device=device)  # pages of zeros cost nothing yet
    return made.fill_(initial) if initial else made
