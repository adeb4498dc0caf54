"""Residency: which states of a schedule pass through the pool of the device tier, and where.

A state that rests below the device tier has one room in the pool, the same in every step; several
share bytes at different times. What an action needs of the pool, and what it reads and writes
there and on the tiers, follows from its kind alone: the pass that inserts FETCH and EVICT, the
validator, the simulator and the runtime all ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State

Item = str  # "parameters 3", "gradients 3", "optimizer 3#1": a state of a stage, or a part of it
Room = tuple[int, int]  # offset, bytes

_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_PASSES = (Kind.FORWARD, Kind.RECOMPUTE, *_BACK, Kind.PREFILL, Kind.DECODE)


def item(state: State, stage: int, part: int = WHOLE) -> Item:
    """The name of a state of a stage, or of one part of it."""
    return f"{state.value} {stage}" if part == WHOLE else f"{state.value} {stage}#{part}"


def moved(action: Action) -> Item:
    """The item that a FETCH or EVICT moves."""
    return item(action.state, action.stage, action.part)


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

    def needs(self, action: Action, last: int, first: int) -> Iterator[Item]:
        """What an action computes with in the pool. last: the last stage, whose FORWARD makes
        gradients of weights too; first: the first that is trained."""
        kind, s = action.kind, action.stage
        if kind in _PASSES:
            yield from self._of(State.PARAMETERS, self.parameters, self.uses[s])
            # A stage computed again is differentiated at once: one visit to the pool.
            learns = kind in (Kind.RECOMPUTE, *_BACK) or (kind is Kind.FORWARD and s == last)
            if learns and s >= first:
                yield from self._of(State.GRADIENTS, self.gradients, self.uses[s])
        elif kind is Kind.UPDATE and action.lane is not Lane.HOST:
            yield from self._of_update(s, action.part)

    @staticmethod
    def _of(state: State, below: frozenset[int], stages: Iterable[int]) -> Iterator[Item]:
        return (item(state, stage) for stage in stages if stage in below)

    def _of_update(self, s: int, part: int) -> Iterator[Item]:
        bundled = part != WHOLE
        if bundled:
            yield item(State.OPTIMIZER, s, part)
        if self.direct or not bundled:
            yield from self._of(State.PARAMETERS, self.parameters - self.fixed, (s,))
            yield from self._of(State.GRADIENTS, self.gradients, (s,))

    def adds(self, action: Action, needed: Item) -> bool:
        """Whether an action adds to what it needs: gradients, from nothing at first."""
        return needed.startswith(State.GRADIENTS) and action.kind is not Kind.UPDATE

    def changes(self, action: Action, needed: Item) -> bool:
        """Whether an action changes what it needs."""
        if action.kind is Kind.UPDATE:
            return not needed.startswith(State.GRADIENTS)
        return needed.startswith(State.GRADIENTS)

    def consumes(self, action: Action, needed: Item) -> bool:
        """Whether nobody needs an item any more in this step once this action has had it."""
        if action.kind is not Kind.UPDATE or not needed.startswith(State.GRADIENTS):
            return False
        return action.part in (WHOLE, self.parts.get(action.stage, 0) - 1)

    # -- what is read and written on the tiers --------------------------------------------------

    def bundle(self, stage: int) -> tuple[Item, ...]:
        """What an update of a part takes from the tiers besides the optimizer states."""
        if self.direct:
            return ()
        grads = self._of(State.GRADIENTS, self.gradients, (stage,))
        return (*grads, *self._of(State.PARAMETERS, self.parameters & self.own, (stage,)))

    def loads(self, action: Action) -> tuple[Item, ...]:
        """Items that an action reads on their tiers."""
        s, part = action.stage, action.part
        if action.kind is Kind.UPDATE and action.lane is Lane.HOST:
            return (item(State.OPTIMIZER, s, part), *self.bundle(s))
        if action.kind is not Kind.FETCH or action.state is State.ACTIVATIONS:
            return ()
        rest = self.bundle(s) if action.state is State.OPTIMIZER else ()
        return (moved(action), *rest)

    def stores(self, action: Action) -> tuple[Item, ...]:
        """Items that an action writes on their tiers."""
        s = action.stage
        on_host = action.kind is Kind.UPDATE and action.lane is Lane.HOST
        if not on_host and (action.kind is not Kind.EVICT or action.state is State.ACTIVATIONS):
            return ()
        mine = item(State.OPTIMIZER, s, action.part) if on_host else moved(action)
        if (on_host or action.state is State.OPTIMIZER) and not self.direct:
            return (mine, *self._of(State.PARAMETERS, self.parameters, (s,)))
        return (mine,)


class Presence:
    """The items that are in the pool, as a schedule's list goes on."""

    def __init__(self, residency: Residency, last: int, first: int) -> None:
        self.residency, self._last, self._first = residency, last, first
        self.present = set(residency.start)

    def step(self, action: Action) -> tuple[Item, ...]:
        """Go past an action; gives the items that it made anew."""
        residency = self.residency
        if action.kind is Kind.FETCH and action.state is not State.ACTIVATIONS:
            self._enter(moved(action))
        if self.outdated(action) and action.lane is Lane.HOST:
            self.present.discard(item(State.PARAMETERS, action.stage))
        needed = residency.needs(action, self._last, self._first)
        made = tuple(name for name in needed if name not in self.present)
        for name in made:
            self._enter(name)
        return made

    def outdated(self, action: Action) -> bool:
        """Whether an update changes parameters elsewhere that the pool holds still."""
        if action.kind is not Kind.UPDATE or action.part == WHOLE or self.residency.direct:
            return False
        return item(State.PARAMETERS, action.stage) in self.present

    def _enter(self, name: Item) -> None:
        rooms = self.residency.rooms
        room = rooms[name]
        self.present -= {other for other in self.present if overlap(rooms[other], room)}
        self.present.add(name)
