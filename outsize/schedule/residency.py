"""Residency: which states of a schedule pass through the pool of the device tier, and where.

A state that rests below the device tier has one room in the pool, the same in every step; several
share bytes at different times. What an action needs of the pool, and what it reads and writes
there and on the tiers, follows from its kind alone: the pass that inserts FETCH and EVICT, the
validator, the simulator and the runtime all ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.item import Item

Room = tuple[int, int]  # offset, bytes

COMES = (Kind.FETCH, Kind.GATHER)  # into a room of the pool
SHARED = (Kind.GATHER, Kind.REDUCE, Kind.COLLECT)  # between workers
MOVES = (*COMES, Kind.EVICT, Kind.REDUCE, Kind.COLLECT, Kind.MERGE)


def moved(action: Action) -> Item:
    """The item that an action moves."""
    return Item(action.state, action.stage, action.part)


def overlap(one: Room, other: Room) -> bool:
    """Two rooms share bytes."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


@dataclass(frozen=True)
class Residency:
    """uses: by stage, the stages whose parameters its passes compute with.

    parameters, gradients: the stages whose parameters or gradients rest below the device tier.
    parts: by stage, the parts in which optimizer states that rest below are updated. direct: an
    update takes gradients and parameters from the pool, right behind the backward pass; else from
    their tiers. own: stages whose parameters are their own master copy. spills: the stages whose
    activations rest below. rooms: of every item that passes through the pool. start: items that
    are there when the schedule begins. fixed: stages whose parameters below are all frozen: they
    are read and never written. hosts: stages whose parts can be updated where they rest.

    Among workers, gathered: stages whose parameters are cut and pass through the pool, by GATHER.
    summed: stages whose gradients are parts of a sum, by REDUCE: of a stage in `gradients` too at
    the end of each stay in the pool, which begins with zeros; of others once. collected: stages of
    whose parameters a worker updates some and has the others by COLLECT. merged: stages that
    several workers of a pipeline hold, whose gradients are summed over them by MERGE. shares:
    parameters and gradients of stages that are cut, whose shares rest below: a FETCH of the share
    stands before GATHER, an EVICT of it behind REDUCE, each in the room of the whole.
    """

    uses: tuple[tuple[int, ...], ...]
    parameters: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    parts: Mapping[int, int] = field(default_factory=dict)
    direct: bool = False
    own: frozenset[int] = frozenset()
    spills: frozenset[int] = frozenset()
    rooms: Mapping[Item, Room] = field(default_factory=dict)
    start: frozenset[Item] = frozenset()
    fixed: frozenset[int] = frozenset()
    hosts: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    collected: frozenset[int] = frozenset()
    merged: frozenset[int] = frozenset()
    shares: frozenset[tuple[State, int]] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """What two of them are compared by: all but the rooms, which follow from sizes."""
        values = (getattr(self, one.name) for one in fields(self) if one.name != "rooms")
        return tuple(tuple(sorted(v.items())) if isinstance(v, Mapping) else v for v in values)

    def needs(self, action: Action, first: int) -> Iterator[Item]:
        """What an action computes with in the pool. first: the first stage that is trained."""
        kind, s = action.kind, action.stage
        if kind.reads:
            stages = self.uses[s] if kind.reads == "uses" else (s,)
            yield from self._of(State.PARAMETERS, self.parameters, stages)
            # A stage computed again is differentiated at once: one visit to the pool.
            if (kind.adds or kind is Kind.RECOMPUTE) and s >= first:
                yield from self._of(State.GRADIENTS, self.gradients, stages)
        elif kind is Kind.UPDATE and action.lane is not Lane.HOST:
            yield from self._of_update(s, action.part)

    @staticmethod
    def _of(state: State, below: frozenset[int], stages: Iterable[int]) -> Iterator[Item]:
        return (Item(state, stage) for stage in stages if stage in below)

    def _of_update(self, s: int, part: int) -> Iterator[Item]:
        bundled = part != WHOLE
        if bundled:
            yield Item(State.OPTIMIZER, s, part)
        if self.direct or not bundled:
            if s in self.parameters and s not in self.fixed and s not in self.gathered:
                yield Item(State.PARAMETERS, s)
            if s in self.gradients and s not in self.summed:
                yield Item(State.GRADIENTS, s)

    def shared(self, name: Item) -> bool:
        """Whether this worker's share of an item rests below, and others have theirs."""
        return (name.state, name.stage) in self.shares

    def alone(self, state: State, stages: frozenset[int]) -> frozenset[int]:
        """Of stages whose parameters or gradients pass through the pool those that come from this
        worker's tiers, whole or as a share."""
        others = self.gathered if state is State.PARAMETERS else self.summed
        return stages - others | {s for one, s in self.shares if one is state}

    def anew(self, name: Item) -> bool:
        """Whether an item begins with zeros whenever it is not in the pool."""
        summed = name.state is State.GRADIENTS and name.stage in self.summed
        return summed and not self.shared(name)

    def adds(self, action: Action, needed: Item) -> bool:
        """Whether an action adds to what it needs: gradients, from nothing at first."""
        return needed.state is State.GRADIENTS and action.kind is not Kind.UPDATE

    def changes(self, action: Action, needed: Item) -> bool:
        """Whether an action changes what it needs."""
        if action.kind is Kind.UPDATE:
            return needed.state is not State.GRADIENTS
        return needed.state is State.GRADIENTS

    def consumes(self, action: Action, needed: Item) -> bool:
        """Whether nobody needs an item any more in this step once this action has had it."""
        if action.kind is not Kind.UPDATE or needed.state is not State.GRADIENTS:
            return False
        return action.part in (WHOLE, self.parts.get(action.stage, 0) - 1)

    # -- what is read and written on the tiers --------------------------------------------------

    def bundle(self, stage: int) -> tuple[Item, ...]:
        """What an update of a part takes from the tiers besides the optimizer states."""
        grads, own = (Item(state, stage) for state in (State.GRADIENTS, State.PARAMETERS))
        found = [grads] if self.bundled(grads) else []
        return (*found, own) if stage in self.own and self.bundled(own) else tuple(found)

    def bundled(self, name: Item) -> bool:
        """Whether a stage's parameters or gradients come and go with the parts of its optimizer
        states, each with its own: shares do always."""
        stages = self.parameters if name.state is State.PARAMETERS else self.gradients
        if self.direct:
            return self.shared(name)
        return name.stage in self.alone(name.state, stages)

    def loads(self, action: Action) -> tuple[Item, ...]:
        """Items that an action reads on their tiers."""
        s, part = action.stage, action.part
        if action.kind is Kind.UPDATE and action.lane is Lane.HOST:
            return (Item(State.OPTIMIZER, s, part), *self.bundle(s))
        if action.kind is Kind.NORM:
            return tuple(Item(State.GRADIENTS, s) for s in sorted(self.summed | self.merged))
        if action.kind is Kind.UPDATE:
            return tuple(self._of(State.GRADIENTS, self.summed | self.merged, (s,)))
        if (
            action.kind not in (*COMES, Kind.COLLECT, Kind.MERGE)
            or action.state is State.ACTIVATIONS
        ):
            return ()
        rest = self.bundle(s) if action.state is State.OPTIMIZER else ()
        return (moved(action), *rest)

    def stores(self, action: Action) -> tuple[Item, ...]:
        """Items that an action writes on their tiers."""
        s = action.stage
        on_host = action.kind is Kind.UPDATE and action.lane is Lane.HOST
        cut = tuple(self._of(State.PARAMETERS, self.gathered | self.collected, (s,)))
        if action.kind is Kind.UPDATE and not on_host:
            return cut
        leaves = action.kind in (Kind.EVICT, Kind.REDUCE, Kind.COLLECT, Kind.MERGE)
        if not on_host and (not leaves or action.state is State.ACTIVATIONS):
            return ()
        mine = Item(State.OPTIMIZER, s, action.part) if on_host else moved(action)
        parameters = Item(State.PARAMETERS, s)
        if (on_host or action.state is State.OPTIMIZER) and self.bundled(parameters):
            return (mine, parameters)
        return (mine, *cut) if on_host else (mine,)


class Presence:
    """The items that are in the pool, as a schedule's list goes on."""

    def __init__(self, residency: Residency, first: int) -> None:
        self.residency, self._first = residency, first
        self.present = set(residency.start)

    def step(self, action: Action) -> tuple[Item, ...]:
        """Go past an action; gives the items that it made anew."""
        residency = self.residency
        if action.kind in COMES and action.state is not State.ACTIVATIONS:
            self._enter(moved(action))
        if action.kind is Kind.REDUCE:
            self.present.discard(moved(action))
        if action.kind is Kind.UPDATE and action.stage in residency.gathered:
            self.present.discard(Item(State.PARAMETERS, action.stage))
        if self.outdated(action) and action.lane is Lane.HOST:
            self.present.discard(Item(State.PARAMETERS, action.stage))
        needed = residency.needs(action, self._first)
        made = tuple(name for name in needed if name not in self.present)
        for name in made:
            self._enter(name)
        return made

    def outdated(self, action: Action) -> bool:
        """Whether an update changes parameters elsewhere that the pool holds still."""
        if action.kind is not Kind.UPDATE or action.part == WHOLE or self.residency.direct:
            return False
        if action.stage in self.residency.gathered:
            return False
        return Item(State.PARAMETERS, action.stage) in self.present

    def _enter(self, name: Item) -> None:
        rooms = self.residency.rooms
        room = rooms[name]
        self.present -= {other for other in self.present if overlap(rooms[other], room)}
        self.present.add(name)
