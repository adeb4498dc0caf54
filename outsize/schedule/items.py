"""Items: what passes through the pool together, and the parts that a stage is updated in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest

import torch

from outsize.memory.store import rounded
from outsize.plan import DEVICE, Plan
from outsize.plan import plan as plans
from outsize.schedule.action import Lane, State
from outsize.schedule.chunks import Chunks
from outsize.schedule.item import Item
from outsize.schedule.kept import GRADIENTS, MASTER, PARAMETERS
from outsize.schedule.residency import Residency

_NONE = frozenset[int]()


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
class Items:
    """What of a plan's chunks passes through the pool.

    host: names of the tiers that are memory, where parts can be updated as they rest. apart: the
    device has memory of its own, to which microbatches are copied.
    """

    chunks: Chunks
    host: frozenset[str] = frozenset()
    apart: bool = False

    @property
    def plan(self) -> Plan:
        return self.chunks.plan

    @cached_property
    def pieces(self) -> Mapping[int, tuple[Piece, ...]]:
        """By stage whose optimizer states rest below, the parts of its update."""
        found: dict[int, tuple[Piece, ...]] = {}
        for stage, chunks in enumerate(self.chunks.of_stage):
            mine = [p for c in chunks for p in self._pieces(c)]
            if self.plan.stages[stage].rest.optimizer != DEVICE and mine:
                found[stage] = tuple(mine)
        return found

    def _pieces(self, chunk: int) -> Iterator[Piece]:
        table = self.chunks.tables[chunk]
        parted = any(self.parted(chunk, what) for what in (PARAMETERS, GRADIENTS))
        if not table.trainable or not (
            self.chunks.kept.names(table) or self.chunks.kept.dtypes.master or parted
        ):
            return
        others = self._others(chunk)
        mine = self._parts(chunk, self.chunks.index)
        end = self.chunks.extent(chunk, MASTER)[1]
        mine += ((end, end),) * (len(others) - len(mine))
        for (first, last), theirs in zip(mine, others, strict=True):
            yield Piece(chunk, first, last, theirs)

    def _others(self, chunk: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By part of a chunk, what it is on other workers. All workers of the data axis have as
        many parts, some of them empty, and rooms as large: what they do together then stands at the
        same places of their schedules."""
        last = self.plan.mesh.data - 1  # whose shares are the largest where any element may be cut
        places = (last,) if self.chunks.tables[chunk].grain == 1 else range(last + 1)
        every = (self._parts(chunk, place) for place in places)
        return tuple(zip_longest(*every, fillvalue=(0, 0)))

    def _parts(self, chunk: int, place: int) -> tuple[tuple[int, int], ...]:
        """The parts of a chunk that a worker of the data axis updates."""
        span = self.chunks.extent(chunk, MASTER, place)
        return tuple(
            pairwise(self.chunks.tables[chunk].cuts(self.plan.stream.part, plans.PART, span))
        )

    @cached_property
    def residency(self) -> Residency:
        """What passes through the pool, without rooms."""
        plan = self.plan
        stages = range(len(plan.stages))
        learning = self.chunks.learning()
        apart = self.chunks.shards.gradients > 1
        below = [s for s in learning if apart or plan.stages[s].rest.gradients != DEVICE]
        streamed = [c for c in range(len(self.chunks.tables)) if self.chunks.passes(c, PARAMETERS)]
        changed = {c for c in streamed if self.chunks.tables[c].trainable}
        where = {c: self.chunks.stage_of[self.chunks.tables[c].segment] for c in streamed}
        return Residency(
            tuple(self.chunks.stage_uses(s) for s in stages),
            frozenset(where.values()),
            frozenset(below),
            {s: len(pieces) for s, pieces in self.pieces.items()},
            plan.update == "behind" and not plan.stream.host,
            frozenset(stages) if self.chunks.kept.dtypes.master is None else frozenset(),
            frozenset(s for s in stages if plan.stages[s].spills),
            fixed=frozenset(where.values()) - {where[c] for c in changed},
            hosts=frozenset(s for s in self.pieces if self._in_memory(s)),
            gathered=frozenset(where.values())
            if self.chunks.shards.parameters > 1
            else frozenset(),
            summed=self.chunks.summed,
            collected=learning
            if self.chunks.shards.optimizer > self.chunks.shards.parameters
            else frozenset(),
            merged=learning & self._merged(),
            shares=frozenset(self._shares()),
        )

    def _shares(self) -> Iterator[tuple[State, int]]:
        """What is cut over workers, of which this one's share rests below."""
        for chunk, table in enumerate(self.chunks.tables):
            for state, what in ((State.PARAMETERS, PARAMETERS), (State.GRADIENTS, GRADIENTS)):
                kept = what == PARAMETERS or table.trainable
                if kept and self.parted(chunk, what):
                    yield state, self.chunks.stage_of[table.segment]

    def _merged(self) -> frozenset[int]:
        """Stages that this worker and others of the pipeline hold whole."""
        line = self.chunks.pipelining
        return (
            frozenset(s for s in line.merged if self.chunks.turn in line.holders[s])
            if line
            else _NONE
        )

    def _in_memory(self, stage: int) -> bool:
        """Whether a stage's parts can be updated where they rest: not where workers put matrices
        together for that, which they do in the thread that computes."""
        tables = (self.chunks.tables[chunk] for chunk in self.chunks.of_stage[stage])
        if any(table.joint for table in tables):
            return False
        rest = self.plan.stages[stage].rest
        reached = rest.parameters == DEVICE or rest.parameters in self.host
        below = self.plan.update == "apart" and {rest.optimizer, rest.gradients} <= self.host
        return reached and below

    def parted(self, chunk: int, what: str) -> bool:
        """Whether workers have shares of a chunk's parameters or gradients, which rest below."""
        own = self.chunks.shards
        degree = own.parameters if what == PARAMETERS else own.gradients
        return degree > 1 and self.chunks.tier(chunk, what) != DEVICE

    @cached_property
    def spans(self) -> Mapping[Item, tuple[Span, ...]]:
        """What every item holds, one after the other from the beginning of its room."""
        found: dict[Item, tuple[Span, ...]] = {}
        for stage, chunks in enumerate(self.chunks.of_stage):
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
            for name, dtype in self.chunks.held(chunk):
                if name == what and self.chunks.passes(chunk, what):
                    yield Span(chunk, what, 0, self.chunks.tables[chunk].numel, dtype, 0)

    def bundle(self, stage: int, piece: Piece) -> Iterator[Span]:
        """What an update of a part needs that is not on the device."""
        residency = self.residency
        for what, dtype in self.chunks.held(piece.chunk):
            load = store = True
            if what in (PARAMETERS, GRADIENTS):
                if not residency.bundled(Item(State(what), stage)):
                    continue
                load = what == GRADIENTS or self.chunks.kept.dtypes.master is None
                store = what == PARAMETERS
            own = self.chunks.within(piece.chunk, what, piece.first, piece.last)
            yield Span(piece.chunk, what, *own, dtype, 0, load, store)

    def moved(self, name: Item, fetch: bool) -> Iterator[Span]:
        """What of an item a FETCH reads on its tier or an EVICT writes there, at its place in the
        room: of what workers cut, this one's share."""
        shared = self.residency.shared(name)
        for span in self.spans[name]:
            if shared:
                if not self.parted(span.chunk, span.what):
                    continue
                first, last = self.chunks.share(span.chunk, span.what)
                offset = span.offset + first * span.dtype.itemsize
                span = replace(span, first=first, last=last, offset=offset)
            if (span.load if fetch else span.store) and span.bytes:
                yield span

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
        owns = (self.chunks.within(span.chunk, span.what, *other) for other in others)
        return max(span.bytes, *((b - a) * span.dtype.itemsize for a, b in owns), 0)

    @cached_property
    def outline(self) -> tuple[object, ...]:
        """All that a list is made from and that may differ along the data axis: workers of one
        place of the pipeline that have it in common have the same list."""
        sizes = tuple(sorted(self.sizes.items()))
        return (sizes, self.residency.key, tuple(sorted(self.lanes.items())))

    @cached_property
    def lanes(self) -> Mapping[int, tuple[Lane, ...]]:
        """By stage, where its parts are updated: the device, or where they rest.

        Of `stream.host` parts `stream.over` go over the device, as evenly as can be (Maurya et al.,
        "Deep Optimizer States", 2024), the others are updated on the host, on tiers of memory.
        """
        every, over = self.plan.stream.host, self.plan.stream.over
        found: dict[int, tuple[Lane, ...]] = {}
        for stage, pieces in self.pieces.items():
            at_rest = every and self._in_memory(stage)
            found[stage] = tuple(
                Lane.HOST if at_rest and (part + 1) * over % every >= over else Lane.COMPUTE
                for part in range(len(pieces))
            )
        return found


def _packed(spans: Iterator[Span]) -> tuple[Span, ...]:
    """Spans one after the other."""
    offset, found = 0, []
    for span in spans:
        found.append(replace(span, offset=offset))
        offset += rounded(span.bytes)
    return tuple(found)
