"""What an action says to other workers: to whom, over which channel, what, and how many bytes.

The one place where groups of workers follow from a layout: the runtime makes its collectives from
them, the prover plays them, the forecast may count them. Bytes are those of the whole operation;
0 where they depend on a microbatch's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from outsize.schedule.action import AHEAD, WHOLE, Action, Kind, State
from outsize.schedule.chunks import Chunks
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.pipelined import peer
from outsize.schedule.program import Says, Talk
from outsize.schedule.schedule import Schedule
from outsize.schedule.vocabulary import PASSES

_WALKS = (
    *AHEAD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, *PASSES,
)  # fmt: skip
_NUMBER = 8  # bytes of one of the few numbers on which all agree


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

    def sharing(self, axis: str, count: int) -> tuple[int, ...]:
        """Neighbours on an axis that hold the same."""
        return self.chunks.plan.mesh.ranks(axis, self.rank, 1, count)

    def of_stages(self, turns: Sequence[int]) -> tuple[int, ...]:
        """Some places of the pipeline axis."""
        ranks = self.chunks.plan.mesh.ranks("pipeline", self.rank)
        return tuple(ranks[turn] for turn in turns)

    def batch(self, own: str) -> tuple[int, ...]:
        """Those with other tokens, over whom no state is cut, of parameters that lie on the axis
        `own`: along that axis a worker has the whole gradient, or shares it (`sharing`)."""
        return self.chunks.plan.mesh.along(lambda axis: axis.sums(own), self.rank)

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
    """The voice of a worker of a mesh. evaluating: its list is an evaluation's."""

    chunks: Chunks
    rank: int
    evaluating: bool = False

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.chunks, self.rank)

    def says(self, schedule: Schedule) -> Says:
        """By place, what an action says to others, in order."""
        if self.chunks.plan.mesh.size == 1:
            return ((),) * len(schedule.workers[0])
        actions = schedule.workers[0]
        reduced = {a.stage: i for i, a in enumerate(actions) if a.kind is Kind.REDUCE}
        ways: dict[Kind, Callable[[Action], Iterator[Talk]]] = dict.fromkeys(_WALKS, self._walk)
        ways |= {
            Kind.GATHER: self._gather, Kind.COLLECT: self._collect, Kind.MERGE: self._merge,
            Kind.EXCHANGE: self._exchange, Kind.SEND: self._pass, Kind.RECV: self._pass,
            Kind.NORM: self._norm, Kind.UPDATE: self._update, Kind.SAMPLE: self._sample,
        }  # fmt: skip
        said = []
        for index, action in enumerate(actions):
            if action.kind is Kind.REDUCE:
                found = self._reduce(action, reduced[action.stage] == index)
            else:
                found = ways[action.kind](action) if action.kind in ways else iter(())
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
                yield Talk(self.groups.gathering.ranks, "network", "all_gather", size)

    def _reduce(self, action: Action, last: bool) -> Iterator[Talk]:
        """Sums go from inner groups to outer ones, each over the shares of the one before
        (hierarchical partitioning), and over other axes at the end, where they are least."""
        chunks, groups = self.chunks, self.groups
        for chunk in self._trained(action.stage):
            if chunks.passes(chunk, GRADIENTS):
                size = self._bytes(chunk, GRADIENTS)
                yield Talk(groups.reducing.ranks, "network", "reduce_scatter", size)
            if last:
                inner, own = (self._bytes(chunk, GRADIENTS, d) for d in (GRADIENTS, MASTER))
                yield Talk(groups.outer.ranks, "network", "reduce_scatter", inner)
                yield Talk(groups.replicas.ranks, "network", "all_reduce", own)
                table = chunks.tables[chunk]
                if table.partial:
                    ranks = groups.sharing(table.axis, table.shared)
                    yield Talk(ranks, "network", "all_reduce", own)
                yield Talk(groups.batch(table.axis), "network", "all_reduce", own)

    def _collect(self, action: Action) -> Iterator[Talk]:
        for chunk in self._trained(action.stage):
            size = self._bytes(chunk, PARAMETERS, PARAMETERS)
            yield Talk(self.groups.collecting.ranks, "network", "all_gather", size)

    def _merge(self, action: Action) -> Iterator[Talk]:
        for chunk in self._trained(action.stage):
            ranks = self.groups.of_stages(self.chunks.holders(self.chunks.tables[chunk]))
            yield Talk(ranks, "merge", "all_reduce", self._bytes(chunk, GRADIENTS, MASTER))

    def _exchange(self, action: Action) -> Iterator[Talk]:
        every = self.groups.of_stages(range(self.chunks.plan.mesh.pipeline))
        yield Talk(every, "exchange", "all_reduce")

    def _pass(self, action: Action) -> Iterator[Talk]:
        line = self.chunks.pipelining
        if line is None or action.state not in (State.ACTIVATIONS, State.GRADIENTS):
            return
        turns = self.chunks.turn, peer(line, action, self.evaluating)
        ends = turns if action.kind is Kind.SEND else turns[::-1]
        yield Talk(self.groups.of_stages(ends), "stages", action.kind.value.lower())

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

    def _walk(self, action: Action) -> Iterator[Talk]:
        """What workers that share a pass say inside of it."""
        yield Talk(self.groups.inside, "compute", "inside")
