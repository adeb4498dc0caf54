"""Placement: where the states of a job's chunks lie, and the schedule that goes with it.

Everything here is arithmetic on the chunks' tables: a forecast asks the same functions as a job, so
what is predicted is what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest

import torch

from outsize.memory import ChunkTable
from outsize.memory.arrange import arrange, least
from outsize.memory.chunk import Dtypes
from outsize.memory.store import rounded
from outsize.optim.declared import StateSpec
from outsize.parallel.shards import Shards, at_borders, even
from outsize.plan import DEVICE, Plan
from outsize.plan import plan as plans
from outsize.schedule.action import Kind, Lane, State
from outsize.schedule.compile.evaluate import compile_forward, forwards
from outsize.schedule.compile.train import base_of
from outsize.schedule.item import Item
from outsize.schedule.passes.offload import streamed, visits
from outsize.schedule.passes.pipeline import linked, placed
from outsize.schedule.passes.shard import spread
from outsize.schedule.pipelined import Pipelining, pipelining_of
from outsize.schedule.residency import Residency, Room
from outsize.schedule.schedule import Schedule

PARAMETERS, GRADIENTS, MASTER = "parameters", "gradients", "master"
_NONE = frozenset[int]()
_DEPTHS = {PARAMETERS: 1, GRADIENTS: 2}  # of cuts: optimizer states lie at 3


@dataclass(frozen=True)
class Span:
    """Elements [first, last) of one state of a chunk, counted in that state, at a byte offset of an
    item's room.

    what: "parameters", "gradients", "master" or the name of an optimizer state. load, store:
    whether it is read from its tier when the item comes, written when it goes.
    """

    chunk: int
    what: str
    first: int
    last: int
    dtype: torch.dtype
    offset: int
    load: bool = True
    store: bool = True

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Elements [first, last) of a chunk that are updated as one part of their stage. others: what
    this part is on the workers of the data axis of whom one has most of every state in it."""

    chunk: int
    first: int
    last: int
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where the states of a plan's chunks go.

    every: tables of the model's chunks. uses: by segment, the segments whose parameters its
    computation reads.
    states: what the optimizer keeps of the parameters that it leaves to its `rest` (of all, where
    it has none); main: of those that it takes itself.
    host: names of the tiers that are memory, where parts can be updated as they rest. index: this
    worker's place on the data axis; turn: on the pipeline axis.
    """

    plan: Plan
    every: tuple[ChunkTable, ...]
    uses: tuple[tuple[int, ...], ...]
    dtypes: Dtypes
    states: tuple[StateSpec, ...]
    main: tuple[StateSpec, ...] = ()
    host: frozenset[str] = frozenset()
    index: int = 0
    turn: int = 0

    # -- stages of a pipeline -------------------------------------------------------------------

    @cached_property
    def pipelining(self) -> Pipelining | None:
        """How the stages lie on the workers of a pipeline, where there is one."""
        if self.plan.mesh.pipeline == 1:
            return None
        uses = [self.stage_uses(s) for s in range(len(self.plan.stages))]
        return pipelining_of(self.plan, self.first, uses, self.rows)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The stages of whose parameters every worker of a pipeline has rows of its own."""
        return tuple(sorted({self.stage_of[t.segment] for t in self.every if t.piped}))

    def holders(self, table: ChunkTable) -> tuple[int, ...]:
        """The places of the pipeline axis that have a chunk, or rows of their own of it."""
        line = self.pipelining
        if line is None:
            return (0,)
        if table.piped:
            return tuple(range(self.plan.mesh.pipeline))
        return line.holders[self.stage_of[table.segment]]

    @cached_property
    def tables(self) -> tuple[ChunkTable, ...]:
        """Of the chunks that this worker has."""
        if self.pipelining is None:
            return self.every
        return tuple(table for table in self.every if self.turn in self.holders(table))

    # -- shards of workers ----------------------------------------------------------------------

    @cached_property
    def shards(self) -> Shards:
        """How the states are cut over the data axis, seen from this worker."""
        own = self.plan.shards
        data = self.plan.mesh.data
        return Shards(own.parameters, own.gradients, own.optimizer, data, self.index)

    def extent(self, chunk: int, what: str, index: int | None = None) -> tuple[int, int]:
        """Elements [first, last) of a chunk of which this worker holds a state between uses. index:
        of another worker of the data axis."""
        table = self.tables[chunk]
        cut = even if table.grain == 1 else at_borders(table.marks, table.grain, table.open)
        return self.shards.span(table.numel, _DEPTHS.get(what, 3), cut, index)

    def within(self, chunk: int, what: str, first: int, last: int) -> tuple[int, int]:
        """Of a state's own elements those that belong to the elements [first, last) of a chunk."""
        table = self.tables[chunk]
        per = self.spec(table, what).per
        return table.before(first, per), table.before(last, per)

    def share(self, chunk: int, what: str, index: int | None = None) -> tuple[int, int]:
        """Of a state's own elements those that this worker holds between uses. index: of another
        worker of the data axis."""
        return self.within(chunk, what, *self.extent(chunk, what, index))

    def numel(self, chunk: int, what: str) -> int:
        """The elements of a whole state of a chunk."""
        return self.within(chunk, what, 0, self.tables[chunk].numel)[1]

    def nbytes(self, chunk: int, what: str, index: int | None = None) -> int:
        """The bytes of a state that this worker (or another) holds between uses."""
        first, last = self.share(chunk, what, index)
        return (last - first) * dict(self.held(chunk))[what].itemsize

    def passes(self, chunk: int, what: str) -> bool:
        """Whether a chunk's whole parameters or gradients are in the pool at times only."""
        degree = self.shards.parameters if what == PARAMETERS else self.shards.gradients
        return degree > 1 or self.tier(chunk, what) != DEVICE

    def _learning(self) -> frozenset[int]:
        return frozenset(self.stage_of[t.segment] for t in self.tables if t.trainable)

    @cached_property
    def _summed(self) -> frozenset[int]:
        """Stages with gradients that are parts of a sum."""
        if self.plan.mesh.summed:
            return self._learning()
        return frozenset(self.stage_of[t.segment] for t in self.tables if t.partial)

    # -- chunks and stages ----------------------------------------------------------------------

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """By segment, its stage."""
        owners = ((i, s) for i, s in enumerate(self.plan.stages) for _ in range(s.first, s.last))
        return tuple(index for index, _ in owners)

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """By stage, its chunks."""
        found: list[list[int]] = [[] for _ in self.plan.stages]
        for index, table in enumerate(self.tables):
            found[self.stage_of[table.segment]].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def first(self) -> int:
        """The first stage that is trained; their number where none is."""
        stages = (self.stage_of[t.segment] for t in self.every if t.trainable)
        return min(stages, default=len(self.plan.stages))

    def stage_uses(self, stage: int) -> tuple[int, ...]:
        """The stages whose parameters a stage computes with, itself first."""
        here = self.plan.stages[stage]
        others = (self.stage_of[u] for i in range(here.first, here.last) for u in self.uses[i])
        return tuple(dict.fromkeys((stage, *others)))

    @cached_property
    def adapted(self) -> frozenset[int]:
        """Stages whose small trainable part stays on the device with its gradients and optimizer
        states, while the frozen rest of its parameters streams and is never written."""
        found = []
        for stage, chunks in enumerate(self.chunks_of):
            rest = self.plan.stages[stage].rest
            numels = {True: 0, False: 0}
            for chunk in chunks:
                numels[self.tables[chunk].trainable] += self.tables[chunk].numel
            if rest.gradients == rest.optimizer == DEVICE and 0 < numels[True] < numels[False]:
                found.append(stage)
        return frozenset(found)

    def tier(self, chunk: int, what: str) -> str:
        """Where a state of a chunk rests."""
        stage = self.stage_of[self.tables[chunk].segment]
        rest = self.plan.stages[stage].rest
        if what == PARAMETERS and self.tables[chunk].trainable and stage in self.adapted:
            return DEVICE
        kinds = {PARAMETERS: rest.parameters, GRADIENTS: rest.gradients}
        return kinds.get(what, rest.optimizer)

    def held(self, chunk: int) -> Iterator[tuple[str, torch.dtype]]:
        """The states that a chunk has, with their dtypes."""
        return self.states_in(self.tables[chunk])

    def states_in(self, table: ChunkTable) -> Iterator[tuple[str, torch.dtype]]:
        """The states of a chunk, of this worker or another, with their dtypes."""
        own = self.dtypes.parameters
        yield PARAMETERS, torch.promote_types(torch.float32, own) if table.wide else own
        if table.trainable:
            yield GRADIENTS, self.dtypes.gradients
            if self.dtypes.master is not None:
                yield MASTER, self.dtypes.master
            for spec in self.specs_of(table):
                yield spec.name, spec.dtype or self.dtypes.optimizer

    def states_of(self, chunk: int) -> tuple[str, ...]:
        """Names of the optimizer states that a chunk has."""
        return self.names_of(self.tables[chunk])

    def names_of(self, table: ChunkTable) -> tuple[str, ...]:
        """The same of a chunk of this worker or another."""
        return tuple(spec.name for spec in self.specs_of(table))

    def specs_of(self, table: ChunkTable) -> tuple[StateSpec, ...]:
        """What the optimizer keeps of a chunk of this worker or another."""
        if not table.trainable:
            return ()
        return self.main if table.main else self.states

    def spec(self, table: ChunkTable, what: str) -> StateSpec:
        """What is declared of a state; what is no optimizer's is of the weights' size."""
        return next((s for s in self.specs_of(table) if s.name == what), StateSpec(what))

    # -- items and their spans ------------------------------------------------------------------

    @cached_property
    def pieces(self) -> Mapping[int, tuple[Piece, ...]]:
        """By stage whose optimizer states rest below, the parts of its update."""
        found: dict[int, tuple[Piece, ...]] = {}
        for stage, chunks in enumerate(self.chunks_of):
            mine = [p for c in chunks for p in self._pieces(c)]
            if self.plan.stages[stage].rest.optimizer != DEVICE and mine:
                found[stage] = tuple(mine)
        return found

    def _pieces(self, chunk: int) -> Iterator[Piece]:
        table = self.tables[chunk]
        if not table.trainable or not (self.states_of(chunk) or self.dtypes.master):
            return
        others = self._others(chunk)
        mine = self._parts(chunk, self.index)
        end = self.extent(chunk, MASTER)[1]
        mine += ((end, end),) * (len(others) - len(mine))
        for (first, last), theirs in zip(mine, others, strict=True):
            yield Piece(chunk, first, last, theirs)

    def _others(self, chunk: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By part of a chunk, what it is on other workers. All workers of the data axis have as
        many parts, some of them empty, and rooms as large: what they do together then stands at the
        same places of their schedules."""
        last = self.plan.mesh.data - 1  # whose shares are the largest where any element may be cut
        places = (last,) if self.tables[chunk].grain == 1 else range(last + 1)
        every = (self._parts(chunk, place) for place in places)
        return tuple(zip_longest(*every, fillvalue=(0, 0)))

    def _parts(self, chunk: int, place: int) -> tuple[tuple[int, int], ...]:
        """The parts of a chunk that a worker of the data axis updates."""
        span = self.extent(chunk, MASTER, place)
        return tuple(pairwise(self.tables[chunk].cuts(self.plan.stream.part, plans.PART, span)))

    @cached_property
    def residency(self) -> Residency:
        """What passes through the pool, without rooms."""
        plan = self.plan
        stages = range(len(plan.stages))
        learning = self._learning()
        apart = self.shards.gradients > 1
        below = [s for s in learning if apart or plan.stages[s].rest.gradients != DEVICE]
        streamed = [c for c in range(len(self.tables)) if self.passes(c, PARAMETERS)]
        changed = {c for c in streamed if self.tables[c].trainable}
        where = {c: self.stage_of[self.tables[c].segment] for c in streamed}
        return Residency(
            tuple(self.stage_uses(s) for s in stages),
            frozenset(where.values()),
            frozenset(below),
            {s: len(pieces) for s, pieces in self.pieces.items()},
            plan.update == "behind" and not plan.stream.host,
            frozenset(stages) if self.dtypes.master is None else frozenset(),
            frozenset(s for s in stages if plan.stages[s].spills),
            fixed=frozenset(where.values()) - {where[c] for c in changed},
            hosts=frozenset(s for s in self.pieces if self._in_memory(s)),
            gathered=frozenset(where.values()) if self.shards.parameters > 1 else frozenset(),
            summed=self._summed,
            collected=learning if self.shards.optimizer > self.shards.parameters else frozenset(),
            merged=learning & self._merged(),
        )

    def _merged(self) -> frozenset[int]:
        """Stages that this worker and others of the pipeline hold whole."""
        line = self.pipelining
        return frozenset(s for s in line.merged if self.turn in line.holders[s]) if line else _NONE

    def _in_memory(self, stage: int) -> bool:
        """Whether a stage's parts can be updated where they rest."""
        rest = self.plan.stages[stage].rest
        reached = rest.parameters == DEVICE or rest.parameters in self.host
        below = self.plan.update == "apart" and {rest.optimizer, rest.gradients} <= self.host
        return reached and below

    @cached_property
    def spans(self) -> Mapping[Item, tuple[Span, ...]]:
        """What every item holds, one after the other from the beginning of its room."""
        found: dict[Item, tuple[Span, ...]] = {}
        for stage, chunks in enumerate(self.chunks_of):
            for state, what, stages in (
                (State.PARAMETERS, PARAMETERS, self.residency.parameters),
                (State.GRADIENTS, GRADIENTS, self.residency.gradients),
            ):
                if stage in stages:
                    found[Item(state, stage)] = _packed(self._whole(chunks, what))
            for part, piece in enumerate(self.pieces.get(stage, ())):
                found[Item(State.OPTIMIZER, stage, part)] = _packed(self.bundle(stage, piece))
        return found

    def _whole(self, chunks: Sequence[int], what: str) -> Iterator[Span]:
        for chunk in chunks:
            for name, dtype in self.held(chunk):
                if name == what and self.passes(chunk, what):
                    yield Span(chunk, what, 0, self.tables[chunk].numel, dtype, 0)

    def bundle(self, stage: int, piece: Piece) -> Iterator[Span]:
        """What an update of a part needs that is not on the device."""
        residency = self.residency
        for what, dtype in self.held(piece.chunk):
            load = store = True
            if what == PARAMETERS:
                if residency.direct or stage not in residency.parameters - residency.gathered:
                    continue
                load = self.dtypes.master is None
            elif what == GRADIENTS:
                if residency.direct or stage not in residency.gradients - residency.summed:
                    continue
                store = False
            own = self.within(piece.chunk, what, piece.first, piece.last)
            yield Span(piece.chunk, what, *own, dtype, 0, load, store)

    @cached_property
    def sizes(self) -> Mapping[Item, int]:
        """Bytes of every item's room."""
        others = {
            Item(State.OPTIMIZER, stage, part): piece.others
            for stage, pieces in self.pieces.items()
            for part, piece in enumerate(pieces)
        }
        return {
            name: sum(rounded(self._most(span, others.get(name, ()))) for span in spans)
            for name, spans in self.spans.items()
        }

    def _most(self, span: Span, others: Sequence[tuple[int, int]]) -> int:
        """Bytes of a span, of the worker that has most in it."""
        owns = (self.within(span.chunk, span.what, *other) for other in others)
        return max(span.bytes, *((b - a) * span.dtype.itemsize for a, b in owns), 0)

    @cached_property
    def outline(self) -> tuple[object, ...]:
        """All that a list is made from and that may differ along the data axis: workers of one
        place of the pipeline that have it in common have the same list."""
        sizes = tuple(sorted(self.sizes.items()))
        return (sizes, self.residency.key, tuple(sorted(self.lanes.items())))

    # -- schedules ------------------------------------------------------------------------------

    @cached_property
    def lanes(self) -> Mapping[int, tuple[Lane, ...]]:
        """By stage, where its parts are updated: the device, or where they rest.

        Of `stream.host` parts one goes over the device (Maurya et al., "Deep Optimizer States",
        2024), the others are updated on the host, on tiers that are memory.
        """
        every = self.plan.stream.host
        found: dict[int, tuple[Lane, ...]] = {}
        for stage, pieces in self.pieces.items():
            at_rest = every and self._in_memory(stage)
            found[stage] = tuple(
                Lane.HOST if at_rest and (part + 1) % every else Lane.COMPUTE
                for part in range(len(pieces))
            )
        return found

    @cached_property
    def base(self) -> Schedule:
        """The step's computing actions alone."""
        head = self.rows[-1] if self.rows else 0
        return base_of(self.plan, self.first, self.lanes, self.pipelining, self.turn, head)

    @cached_property
    def _visits(self) -> tuple[frozenset[Item], ...]:
        return visits(self.base, self.residency, self.plan.stream.parts)

    @cached_property
    def pooled(self) -> Mapping[Item, int]:
        """Bytes of the items that pass through the pool: not those updated where they rest."""
        needed = {name for visit in self._visits for name in visit}
        return {name: size for name, size in self.sizes.items() if name in needed}

    @cached_property
    def rooms(self) -> Mapping[Item, Room]:
        """The rooms of all items that pass through the pool."""
        if not self.pooled:
            return {}
        stream = self.plan.stream
        order = self._visits
        ahead = stream.resident - 1
        pool = stream.pool or least(order, self.pooled, ahead, stream.returned)
        anew = [name for name in self.pooled if name.state is not State.PARAMETERS]
        made = arrange(order, self.pooled, pool, ahead, stream.returned, stream.policy, made=anew)
        return {name: (made.offsets[name], size) for name, size in self.pooled.items()}

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return max((offset + size for offset, size in self.rooms.values()), default=0)

    @cached_property
    def schedule(self) -> Schedule:
        """One step."""
        own = self.residency
        made = streamed(self.base, own, self.rooms, self.plan.stream)
        if own.summed or own.collected or own.merged:
            made = spread(made, own)
        if self.pipelining is not None:
            made = linked(made, self.pipelining, self.plan, self.turn)
        return made

    @cached_property
    def _leaving(self) -> frozenset[int]:
        """The stages whose gradients go to their tier: none where updates take them from the pool,
        but for those that come and go in between."""
        actions = self.schedule.workers[0]
        at_rest = (s for s, lanes in self.lanes.items() if Lane.HOST in lanes)
        moved = (a.stage for a in actions if a.state is State.GRADIENTS and a.kind is Kind.EVICT)
        return frozenset((*moved, *at_rest))

    def leaves(self, segment: int) -> bool:
        """Whether gradients of a segment need a place on their tier."""
        return self.stage_of[segment] in self._leaving

    def evaluation(self, microbatches: int) -> Schedule:
        """So many microbatches forward, through the same rooms."""
        spare = replace(self.residency, spills=frozenset())
        stages, stream = len(self.plan.stages), self.plan.stream
        if self.pipelining is not None:
            base, moves = forwards(self.pipelining, self.turn, microbatches)
            return placed(streamed(base, spare, self.rooms, stream), moves)
        base = replace(compile_forward(stages, microbatches), first=stages)
        return streamed(base, spare, self.rooms, stream)


def _packed(spans: Iterator[Span]) -> tuple[Span, ...]:
    """Spans one after the other."""
    offset, found = 0, []
    for span in spans:
        found.append(replace(span, offset=offset))
        offset += rounded(span.bytes)
    return tuple(found)
