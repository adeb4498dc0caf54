"""Placement: where the states of a job's chunks lie, and the schedule that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from outsize.memory.arrange import arrange, least
from outsize.plan import Plan, Stream
from outsize.schedule.action import Kind, Lane, State
from outsize.schedule.chunks import Chunks
from outsize.schedule.compile.evaluate import forwards
from outsize.schedule.compile.forward import compile_forward
from outsize.schedule.compile.train import base_of
from outsize.schedule.ends import ends_of
from outsize.schedule.item import Item
from outsize.schedule.items import Items
from outsize.schedule.passes.copies import copied
from outsize.schedule.passes.ends import alone
from outsize.schedule.passes.offload import streamed, visits
from outsize.schedule.passes.pipeline import linked, placed
from outsize.schedule.passes.shard import spread
from outsize.schedule.residency import Room
from outsize.schedule.schedule import Schedule


@dataclass(frozen=True)
class Placement:
    """The items of a plan's chunks, their rooms, and the lists of actions that move them. cuts: of
    a step, as Schedule has them."""

    items: Items
    cuts: tuple[int, ...] = ()

    @property
    def chunks(self) -> Chunks:
        return self.items.chunks

    @property
    def plan(self) -> Plan:
        return self.chunks.plan

    def elsewhere(self, index: int, turn: int) -> Placement:
        """The same on the worker at a place of the data and of the pipeline axis."""
        chunks = replace(self.chunks, index=index, turn=turn)
        return replace(self, items=replace(self.items, chunks=chunks))

    @cached_property
    def base(self) -> Schedule:
        """The step's computing actions alone."""
        head = self.chunks.rows[-1] if self.chunks.rows else 0
        return base_of(
            self.plan,
            self.chunks.first,
            self.items.lanes,
            self.chunks.pipelining,
            self.chunks.turn,
            head,
            self.cuts,
        )

    @cached_property
    def _visits(self) -> tuple[frozenset[Item], ...]:
        return visits(self.base, self.items.residency, self.plan.stream.parts)

    @cached_property
    def pooled(self) -> Mapping[Item, int]:
        """Bytes of the items that pass through the pool: not those updated where they rest."""
        needed = {name for visit in self._visits for name in visit}
        return {name: size for name, size in self.items.sizes.items() if name in needed}

    @cached_property
    def rooms(self) -> Mapping[Item, Room]:
        """The rooms of all items that pass through the pool."""
        if not self.pooled:
            return {}
        return _rooms(self._visits, tuple(self.pooled.items()), self.plan.stream)

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return max((offset + size for offset, size in self.rooms.values()), default=0)

    @cached_property
    def schedule(self) -> Schedule:
        """One step."""
        own = self.items.residency
        made = streamed(self.base, own, self.rooms, self.plan.stream)
        if own.summed or own.collected or own.merged:
            made = spread(made, own)
        if self.chunks.pipelining is not None:
            made = linked(made, self.chunks.pipelining, self.plan, self.chunks.turn)
        return self.copying(made)

    def copying(self, schedule: Schedule) -> Schedule:
        """A list over batches, which come to a device with memory of its own."""
        return copied(schedule) if self.items.apart else schedule

    @cached_property
    def _leaving(self) -> frozenset[int]:
        """The stages whose gradients go to their tier: none where updates take them from the pool,
        but for those that come and go in between."""
        actions = self.schedule.workers[0]
        at_rest = (s for s, lanes in self.items.lanes.items() if Lane.HOST in lanes)
        moved = (a.stage for a in actions if a.state is State.GRADIENTS and a.kind is Kind.EVICT)
        return frozenset((*moved, *at_rest))

    def leaves(self, segment: int) -> bool:
        """Whether gradients of a segment need a place on their tier."""
        return self.chunks.stage_of[segment] in self._leaving

    def evaluation(self, microbatches: int, kind: Kind = Kind.FORWARD, groups: int = 0) -> Schedule:
        """So many microbatches forward, through the same rooms. groups: as `forwards` has them."""
        made = self._forward(microbatches, kind, groups)
        return self.copying(made) if kind is Kind.FORWARD else made

    def _forward(self, microbatches: int, kind: Kind, groups: int) -> Schedule:
        spare = replace(self.items.residency, spills=frozenset())
        stages, stream = len(self.plan.stages), self.plan.stream
        if self.chunks.pipelining is not None:
            line, turn = self.chunks.pipelining, self.chunks.turn
            base, moves = forwards(line, turn, microbatches, kind, groups)
            return placed(streamed(base, spare, self.rooms, stream), moves)
        base = replace(compile_forward(stages, microbatches, kind), first=stages)
        ends = ends_of(self.plan.pipeline)
        base = base if ends is None else alone(base, self.chunks.rows[-1], ends)
        return streamed(base, spare, self.rooms, stream)


@lru_cache(maxsize=64)  # a search asks some ten times for the same, and so does each worker
def _rooms(
    order: tuple[frozenset[Item], ...], items: tuple[tuple[Item, int], ...], stream: Stream
) -> Mapping[Item, Room]:
    """Rooms of items with their bytes, for visits in this order."""
    sizes, ahead = dict(items), stream.resident - 1
    pool = stream.pool or least(order, sizes, ahead, stream.returned)
    anew = [name for name in sizes if name.state is not State.PARAMETERS]
    made = arrange(order, sizes, pool, ahead, stream.returned, stream.policy, made=anew)
    return {name: (made.offsets[name], size) for name, size in items}
