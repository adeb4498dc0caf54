"""What an action says to other workers: to whom, over which channel, what, and how many bytes.

The one place where groups of workers follow from a layout: the runtime makes its collectives from
them, the prover plays them, the forecast and `verify` count them. Bytes are those of the whole
operation; those that depend on a microbatch's shape are 0 where nobody has rehearsed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from outsize.collectives.pieces import wider
from outsize.collectives.world import LAYERS
from outsize.memory.chunk import ChunkTable, Slot
from outsize.parallel.messages import Way, code_of
from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.chunks import Chunks
from outsize.schedule.items import Items, Piece
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.pipelined import peer
from outsize.schedule.program import Says, Talk
from outsize.schedule.schedule import Schedule

_NUMBER = 8  # bytes of one of the few numbers on which all agree


@dataclass(frozen=True)
class Said:
    """What the workers of an axis say inside an action by one operation: the bytes that each has
    from the others. beside: by a thread beside the one that computes."""

    axis: str
    operation: str
    bytes: int
    beside: bool = False


Rehearsed = Callable[[Action], Sequence[Said]]


def unknown(action: Action) -> tuple[Said, ...]:
    """Nobody has rehearsed it."""
    return ()


class Neighbours(NamedTuple):
    """Workers of a group, and their places on the data axis."""

    ranks: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """The groups of workers with which the worker `rank` shares states."""

    chunks: Chunks
    rank: int

    def of_data(self, outer: int, inner: int = 1) -> Neighbours:
        """The workers that differ in their place among `outer` neighbours of the data axis, in
        steps of `inner`."""
        places = tuple(self.chunks.shards.neighbours(outer, inner))
        axis = self.chunks.plan.mesh.ranks("data", self.rank)
        return Neighbours(tuple(axis[place] for place in places), places)

    def of_stages(self, turns: Sequence[int]) -> tuple[int, ...]:
        """Some places of the pipeline axis."""
        ranks = self.chunks.plan.mesh.ranks("pipeline", self.rank)
        return tuple(ranks[turn] for turn in turns)

    def summing(self, table: ChunkTable) -> tuple[int, ...]:
        """Those with other parts of a chunk's gradient, over whom no state is cut: along the axes
        on which it lies as its cuts say, along the others those with other tokens."""
        mesh = self.chunks.plan.mesh
        runs = {axis.name: mesh[axis.name] for axis in mesh.axes if axis.batch and not axis.sharded}
        for one in table.copies:
            runs[one.axis] = one.holders if one.partial else 1
        return mesh.runs(runs, self.rank)

    @cached_property
    def inside(self) -> tuple[int, ...]:
        """Those with whom it talks inside layers."""
        return self.chunks.plan.mesh.along(lambda axis: axis.inside, self.rank)

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.chunks.plan.mesh.size))

    @cached_property
    def gathering(self) -> Neighbours:
        """Over whom parameters are cut."""
        return self.of_data(self.chunks.shards.parameters)

    @cached_property
    def reducing(self) -> Neighbours:
        """Over whom gradients are cut."""
        return self.of_data(self.chunks.shards.gradients)

    @cached_property
    def outer(self) -> Neighbours:
        """Those with other parts of the sum of what is left of gradients then."""
        own = self.chunks.shards
        return self.of_data(own.optimizer, own.gradients)

    @cached_property
    def replicas(self) -> Neighbours:
        """Those that update the same."""
        own = self.chunks.shards
        return self.of_data(own.size, own.optimizer)

    @cached_property
    def collecting(self) -> Neighbours:
        """Those that update other parts of the parameters that are here."""
        own = self.chunks.shards
        return self.of_data(own.optimizer, own.parameters)


@dataclass(frozen=True)
class Spoken:
    """The voice of a worker of a mesh. items: of the worker. evaluating: its list is an
    evaluation's. inside: what a rehearsal has heard inside actions on a microbatch."""

    items: Items
    rank: int
    evaluating: bool = False
    inside: Rehearsed = unknown

    @property
    def chunks(self) -> Chunks:
        return self.items.chunks

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.chunks, self.rank)

    def says(self, schedule: Schedule) -> Says:
        """By place, what an action says to others, in order."""
        if self.chunks.plan.mesh.size == 1:
            return ((),) * len(schedule.workers[0])
        actions = schedule.workers[0]
        reduced = {a.stage: i for i, a in enumerate(actions) if a.kind is Kind.REDUCE}
        ways: dict[Kind, Callable[[Action], Iterator[Talk]]] = {
            Kind.GATHER: self._gather, Kind.COLLECT: self._collect, Kind.MERGE: self._merge,
            Kind.EXCHANGE: self._exchange, Kind.SEND: self._pass, Kind.RECV: self._pass,
            Kind.NORM: self._norm, Kind.UPDATE: self._update, Kind.SAMPLE: self._sample,
        }  # fmt: skip
        said = []
        for index, action in enumerate(actions):
            if action.kind is Kind.REDUCE:
                found = self._reduce(action, reduced[action.stage] == index)
            else:
                found = ways.get(action.kind, self._walk)(action)
            said.append(tuple(talk for talk in found if len(talk.ranks) > 1))
        return said

    def _bytes(self, chunk: int, what: str, depth: str = "") -> int:
        """Of a chunk's state what a worker holds, or the whole chunk where no `depth` is named."""
        dtype = dict(self.chunks.held(chunk))[what]
        first, last = self.chunks.extent(chunk, depth) if depth else (0, self._numel(chunk))
        return (last - first) * dtype.itemsize

    def _numel(self, chunk: int) -> int:
        return self.chunks.tables[chunk].numel

    def _trained(self, stage: int) -> Iterator[int]:
        return (c for c in self._chunks(stage) if self.chunks.tables[c].trainable)

    def _chunks(self, stage: int) -> Sequence[int]:
        known = self.chunks.of_stage
        return known[stage] if 0 <= stage < len(known) else ()

    def _gather(self, action: Action) -> Iterator[Talk]:
        for chunk in self._chunks(action.stage):
            if self.chunks.passes(chunk, PARAMETERS):
                size = self._bytes(chunk, PARAMETERS)
                group = self.groups.gathering
                said = Talk(group.ranks, "network", "all_gather", size)
                yield self._coded(said, "gather", group, chunk, PARAMETERS)

    def _coded(self, said: Talk, way: Way, group: Neighbours, chunk: int, what: str) -> Talk:
        """What is said as the plan has messages written. what: the state of the chunk as which it
        is cut over the group."""
        code = code_of(self.chunks.plan, way)
        if code is None or len(group.places) == 1 or self.chunks.tables[chunk].codes:
            return said
        spans = (self.chunks.share(chunk, what, place) for place in group.places)
        lengths = [last - first for first, last in spans]
        size, memory = sum(map(code.bytes, lengths)), code.memory * sum(lengths)
        return said._replace(bytes=size, memory=memory, wide=1)

    def _reduce(self, action: Action, last: bool) -> Iterator[Talk]:
        """Sums go from inner groups to outer ones, each over the shares of the one before
        (hierarchical partitioning), and over other axes at the end, where they are least."""
        chunks, groups = self.chunks, self.groups
        for chunk in self._trained(action.stage):
            wide = _wide(chunks, chunk)
            if chunks.passes(chunk, GRADIENTS):
                size = self._bytes(chunk, GRADIENTS)
                said = Talk(groups.reducing.ranks, "network", "reduce_scatter", size, wide=wide)
                yield self._coded(said, "reduce", groups.reducing, chunk, GRADIENTS)
            if last:
                inner, own = (self._bytes(chunk, GRADIENTS, d) for d in (GRADIENTS, MASTER))
                said = Talk(groups.outer.ranks, "network", "reduce_scatter", inner, wide=wide)
                yield self._coded(said, "reduce", groups.outer, chunk, MASTER)
                for ranks in (groups.replicas.ranks, groups.summing(chunks.tables[chunk])):
                    yield Talk(ranks, "network", "all_reduce", own, wide=wide)

    def _collect(self, action: Action) -> Iterator[Talk]:
        for chunk in self._trained(action.stage):
            size, group = self._bytes(chunk, PARAMETERS, PARAMETERS), self.groups.collecting
            said = Talk(group.ranks, "network", "all_gather", size)
            yield self._coded(said, "collect", group, chunk, MASTER)

    def _merge(self, action: Action) -> Iterator[Talk]:
        for chunk in self._trained(action.stage):
            ranks = self.groups.of_stages(self.chunks.holders(self.chunks.tables[chunk]))
            size = self._bytes(chunk, GRADIENTS, MASTER)
            yield Talk(ranks, "merge", "all_reduce", size, wide=_wide(self.chunks, chunk))

    def _exchange(self, action: Action) -> Iterator[Talk]:
        mesh, heard = self.chunks.plan.mesh, self.inside(action)
        for axis in ("pipeline", "tensor"):  # the few numbers of a loss are of both
            if axis == "tensor" and action.state is not State.SUMS:
                continue
            ranks = mesh.ranks(axis, self.rank)
            had = sum(said.bytes for said in heard if said.axis == axis)
            yield Talk(ranks, "exchange", "all_reduce", _whole(had, "all_reduce", len(ranks)))

    def _pass(self, action: Action) -> Iterator[Talk]:
        line = self.chunks.pipelining
        if line is None or action.state not in (State.ACTIVATIONS, State.GRADIENTS):
            return
        turns = self.chunks.turn, peer(line, action, self.evaluating)
        ends = turns if action.kind is Kind.SEND else turns[::-1]
        size = sum(said.bytes for said in self.inside(action))
        yield Talk(self.groups.of_stages(ends), "stages", action.kind.lower(), size)

    def _norm(self, action: Action) -> Iterator[Talk]:
        slots = sum(len(t.slots) for t in self.chunks.every if t.trainable)
        yield Talk(self.groups.everyone, "agreement", "all_reduce", (2 + slots) * _NUMBER)

    def _sample(self, action: Action) -> Iterator[Talk]:
        """Who has the logits tells the tokens, of which a list does not know how many."""
        yield Talk(self.groups.everyone, "agreement", "broadcast")

    def _update(self, action: Action) -> Iterator[Talk]:
        if self.chunks.plan.update == "behind" and action.part in (WHOLE, 0):
            slots = sum(len(self.chunks.tables[c].slots) for c in self._trained(action.stage))
            yield Talk(self.groups.everyone, "agreement", "all_reduce", (2 + slots) * _NUMBER)
        if action.part == WHOLE:
            trained = self._trained(action.stage)
            pieces = tuple(Piece(c, *self.chunks.extent(c, MASTER)) for c in trained)
        else:
            pieces = self.items.pieces.get(action.stage, ())[action.part : action.part + 1]
        for piece in pieces:
            yield from self._matrices(piece)

    def _matrices(self, piece: Piece) -> Iterator[Talk]:
        """Parameters that every worker of some axes updates whole, of which parts lie on them: what
        has their shape is put together along one after another, with every copy
        (outsize/parallel/whole.py)."""
        table, dtypes = self.chunks.tables[piece.chunk], dict(self.chunks.held(piece.chunk))
        main = MASTER if MASTER in dtypes else PARAMETERS
        shaped = [s.name for s in self.chunks.kept.specs(table) if s.shaped]
        for slot in table.joint:
            if piece.first <= slot.offset < piece.last:
                for what in (main, *shaped, GRADIENTS):
                    yield from self._whole(table, slot, dtypes[what].itemsize)

    def _whole(self, table: ChunkTable, slot: Slot, itemsize: int) -> Iterator[Talk]:
        levels = zip(table.copies, pairwise((*slot.cut_of, slot.numel)), strict=True)
        for one, (whole, here) in reversed(list(levels)):
            if here < whole:
                ranks = self.chunks.plan.mesh.ranks(one.axis, self.rank)
                yield Talk(ranks, "compute", "all_gather", one.holders * whole * itemsize)

    def _walk(self, action: Action) -> Iterator[Talk]:
        """What workers that share a pass say inside of it."""
        if not action.kind.reads:
            return
        heard, mesh = self.inside(action), self.chunks.plan.mesh
        if not heard:
            yield Talk(self.groups.inside, "compute", "inside")
        for said in heard:
            ranks = mesh.ranks(said.axis, self.rank)
            channel, whole = LAYERS[said.beside], len(ranks)
            yield Talk(ranks, channel, said.operation, _whole(said.bytes, said.operation, whole))


def _whole(had: float, operation: str, count: int) -> float:
    """Bytes of an operation of which each of `count` workers has so many from others."""
    return had * count / max(1, count - 1) / (2 if operation == "all_reduce" else 1)


def _wide(chunks: Chunks, chunk: int) -> float:
    """Times as wide as a chunk's gradients is what sums of them are formed in."""
    dtype = dict(chunks.held(chunk))[GRADIENTS]
    return wider(dtype).itemsize / dtype.itemsize
