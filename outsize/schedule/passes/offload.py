"""The pass that lets states pass through the pool: it inserts FETCH and EVICT into a schedule.

Rooms are given; bringing an item in throws out whatever shares bytes with its room, so what is
fetched when follows from playing the step. A FETCH stands as early as its room is free and the
window of stages allows, an EVICT right behind the last change; the lanes do the rest. Optimizer
states: Rajbhandari et al., "ZeRO-Infinity", 2021; parameters: "Superpipeline", 2024; activations:
Wu et al., "SSDTrain", 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outsize.plan import Stream
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.item import Item
from outsize.schedule.passes.spill import spill
from outsize.schedule.residency import Residency, Room, overlap
from outsize.schedule.schedule import Schedule


def visits(schedule: Schedule, residency: Residency, parts: int = 1) -> tuple[frozenset[Item], ...]:
    """The items that are needed together, in order: what the rooms are arranged for.

    parts: parts of a stage's update that are there together."""
    found = (needed for needed, _ in _visits(schedule, residency, parts))
    return tuple(needed for needed in found if needed)


def _visits(
    schedule: Schedule, residency: Residency, parts: int = 1
) -> list[tuple[frozenset[Item], list[int]]]:
    """Runs of computing actions that need the same items, with the actions' places; updates of
    `parts` parts of a stage are one run."""
    runs: list[tuple[frozenset[Item], list[int]]] = []
    group: tuple[int, int] | None = None
    for index, action in enumerate(schedule.workers[0]):
        needed = frozenset(residency.needs(action, schedule.first))
        before, group = group, _group(action, parts)
        if runs and (runs[-1][0] == needed or (group is not None and group == before)):
            runs[-1] = (runs[-1][0] | needed, [*runs[-1][1], index])
        else:
            runs.append((needed, [index]))
    return runs


def _group(action: Action, parts: int) -> tuple[int, int] | None:
    """Which updates of parts belong together; None: what is no update of a part."""
    if action.kind is not Kind.UPDATE or action.part == WHOLE or action.lane is Lane.HOST:
        return None
    return action.stage, action.part // parts


@dataclass
class _Stay:
    """One stay of an item in the pool: computing actions [first, last] have it."""

    item: Item
    fetch: int | None  # the place before which it is fetched; None: made here, or there before
    last: int
    changed: int | None = None  # the last action that changed it
    dead: bool = False  # nobody reads it again before it is made anew


@dataclass
class _Pool:
    """The pool while a step is played."""

    rooms: Mapping[Item, Room]
    present: dict[Item, _Stay] = field(default_factory=dict)
    stays: list[_Stay] = field(default_factory=list)
    left: dict[Room, int] = field(default_factory=dict)  # the last action that used a room
    changed: dict[Item, int] = field(default_factory=dict)  # the last action that changed an item

    def enter(
        self, name: Item, at: int, earliest: int, new: bool, loads: Iterable[Item] = ()
    ) -> None:
        """Bring an item in for action `at`; throws out what shares its room. loads: what is read
        for it: not before that was written."""
        room = self.rooms[name]
        for other in [o for o in self.present if overlap(self.rooms[o], room)]:
            self.leave(other)
        used = (last for other, last in self.left.items() if overlap(other, room))
        written = (self.changed.get(other, -1) for other in loads)
        free = max(earliest, *(last + 1 for last in (*used, *written)), 0)
        stay = _Stay(name, None if new else free, at)
        self.present[name] = stay
        self.stays.append(stay)

    def leave(self, name: Item) -> None:
        stay, room = self.present.pop(name), self.rooms[name]
        self.left[room] = max(stay.last, self.left.get(room, -1))

    def begin(self) -> frozenset[Item]:
        """A new step: what is there still, of what may be used again."""
        # Gradients are made anew, and parts of an update take them along.
        kept = [n for n in self.present if n.state is State.PARAMETERS]
        self.present = {name: _Stay(name, None, -1) for name in kept}
        self.stays, self.left, self.changed = list(self.present.values()), {}, {}
        return frozenset(kept)


def offload(
    schedule: Schedule, residency: Residency, ahead: int = 1, returned: int = 1, parts: int = 1
) -> Schedule:
    """The schedule with what passes through the pool fetched and evicted.

    ahead: stages that may be fetched before the one at work; returned: given back at a time; parts:
    parts of a stage's update that are there together.
    """
    pool = _Pool(residency.rooms)
    runs = _visits(schedule, residency, parts)
    start: frozenset[Item] = frozenset()
    for _ in range(2):  # the second time begins with what a step leaves there
        start = pool.begin()
        _play(schedule, residency, pool, runs, ahead, returned)
    before, after = _moves(residency, pool.stays)
    spill(schedule, residency.spills, before, after)
    worker: list[Action] = []
    for index, action in enumerate(schedule.workers[0]):
        worker += [*before[index], action, *after[index]]
    return replace(schedule, workers=(tuple(worker),), residency=replace(residency, start=start))


def _play(
    schedule: Schedule,
    residency: Residency,
    pool: _Pool,
    runs: Sequence[tuple[frozenset[Item], list[int]]],
    ahead: int,
    returned: int,
) -> None:
    actions = schedule.workers[0]
    busy = [number for number, (needed, _) in enumerate(runs) if needed]
    turn = {number: place for place, number in enumerate(busy)}
    known: set[Item] = set()  # gradients that exist in this step
    for number, (needed, places) in enumerate(runs):
        if not needed:
            for index in places:
                _outdate(residency, actions[index], index, pool)
            continue
        window = -(-(turn[number] - ahead) // returned) * returned
        asking = runs[busy[max(0, min(window, turn[number]))]][1]
        needs = {i: tuple(residency.needs(actions[i], schedule.first)) for i in places}
        wanted = tuple(dict.fromkeys(name for names in needs.values() for name in names))
        for place, name in enumerate(wanted):
            again = residency.anew(name) and name not in pool.present
            new = (name not in known or again) and residency.adds(actions[places[0]], name)
            if new or name not in pool.present:
                # Spread over the visit at work, so that what that waits for is not held up.
                earliest = asking[place * len(asking) // len(wanted)]
                loads = residency.loads(_coming(residency, name)[0])
                pool.enter(name, places[0], min(earliest, places[0]), new, loads)
            known.add(name)
        for index, names in needs.items():
            _outdate(residency, actions[index], index, pool)
            _touch(residency, actions[index], index, names, pool)


def _outdate(residency: Residency, action: Action, index: int, pool: _Pool) -> None:
    """An update of what rests elsewhere changes parameters that the pool may still hold."""
    if action.kind is not Kind.UPDATE:
        return
    name = Item(State.PARAMETERS, action.stage)
    if action.stage in residency.gathered:
        pool.changed[name] = index
        if name in pool.present:
            pool.leave(name)
        return
    if action.part == WHOLE or residency.direct:
        return
    if name in pool.present:
        pool.present[name].last = index  # the update writes there too
        if action.lane is Lane.HOST:
            pool.leave(name)


def _touch(
    residency: Residency, action: Action, index: int, needed: Iterable[Item], pool: _Pool
) -> None:
    for name in needed:
        stay = pool.present[name]
        stay.last = index
        if residency.changes(action, name):
            stay.changed = pool.changed[name] = index
        if residency.consumes(action, name):
            stay.dead = True


def _moves(
    residency: Residency,
    stays: Iterable[_Stay],
) -> tuple[defaultdict[int, list[Action]], defaultdict[int, list[Action]]]:
    before: defaultdict[int, list[Action]] = defaultdict(list)
    after: defaultdict[int, list[Action]] = defaultdict(list)
    for stay in stays:
        if stay.fetch is not None:
            before[stay.fetch] += _coming(residency, stay.item)
        if stay.changed is not None and not stay.dead:
            after[stay.changed] += _going(residency, stay.item)
    return before, after


def _coming(residency: Residency, name: Item) -> tuple[Action, ...]:
    """What brings an item into its room: of parameters that are cut, a share that rests below and
    then the others' (Rajbhandari et al., "ZeRO-Infinity", 2021: each by its own link)."""
    fetch = _move(Kind.FETCH, Lane.FETCH, name)
    if name.state is not State.PARAMETERS or name.stage not in residency.gathered:
        return (fetch,)
    gather = _move(Kind.GATHER, Lane.NETWORK, name)
    return (fetch, gather) if residency.shared(name) else (gather,)


def _going(residency: Residency, name: Item) -> tuple[Action, ...]:
    """What takes an item's changes away."""
    evict, reduce = _move(Kind.EVICT, Lane.EVICT, name), _move(Kind.REDUCE, Lane.NETWORK, name)
    if name.state is State.GRADIENTS and residency.shared(name):
        return (reduce, evict)
    return (reduce,) if residency.anew(name) else (evict,)


def _move(kind: Kind, lane: Lane, name: Item) -> Action:
    return Action(kind, name.stage, lane=lane, state=name.state, part=name.part)


def streamed(
    base: Schedule, residency: Residency, rooms: Mapping[Item, Room], stream: Stream
) -> Schedule:
    """A list with everything that passes through the pool, where anything does."""
    if not rooms and not residency.spills and not residency.parts:
        return base
    having = replace(residency, rooms=rooms)
    return offload(base, having, stream.resident - 1, stream.returned, stream.parts)
