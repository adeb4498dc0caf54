"""What each action of a worker waits for: the hazards between lanes.

The list of a worker is one order in which everything could run, one action after another. Lanes
run beside each other as far as that changes no result: an action waits for earlier ones that wrote
what it reads, or read or wrote what it writes. Besides, nothing leaves its lane's queue before the
computing action that stands before it in the list has ended: so a place in the list is the earliest
start, and what is in memory does not depend on how fast the lanes are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.ends import Ends
from outsize.schedule.item import Item
from outsize.schedule.residency import (
    COMES,
    MOVES,
    Presence,
    Residency,
    Room,
    moved,
)
from outsize.schedule.schedule import Schedule

Resource = tuple[object, ...]
Waits = tuple[tuple[int, ...], ...]


def waits(schedule: Schedule) -> Waits:
    """For every action the places of those it waits for, at most one of each other lane."""
    actions = schedule.workers[0]
    if all(action.lane is Lane.COMPUTE for action in actions):
        return ((),) * len(actions)
    reader = _Reader(schedule)
    books: dict[Resource, _Book] = {}
    found: list[tuple[int, ...]] = []
    last_compute = -1
    for index, action in enumerate(actions):
        latest: dict[Lane, int] = {}
        if action.lane is not Lane.COMPUTE and last_compute >= 0:
            latest[Lane.COMPUTE] = last_compute
        for resource, writes in reader.uses(action):
            books.setdefault(resource, _Book()).enter(action.lane, index, writes, latest)
        latest.pop(action.lane, None)
        found.append(tuple(sorted(latest.values())))
        if action.lane is Lane.COMPUTE:
            last_compute = index
    return tuple(found)


def settled(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Which EVICTs of activations must have ended before which action begins, by its place.

    Their bytes are let go there: before the second computing action after the EVICT, or at the end
    (the place behind the last action).
    """
    actions = schedule.workers[0]
    due: dict[int, list[int]] = {}
    waiting: list[tuple[int, int]] = []  # (place, computing actions since)
    for index, action in enumerate(actions):
        if action.lane is Lane.COMPUTE:
            for place, seen in waiting:
                if seen == 1:
                    due.setdefault(index, []).append(place)
            waiting = [(place, seen + 1) for place, seen in waiting if seen == 0]
        elif action.kind is Kind.EVICT and action.state is State.ACTIVATIONS:
            waiting.append((index, 0))
    if waiting:
        due[len(actions)] = [place for place, _ in waiting]
    return {index: tuple(places) for index, places in due.items()}


def _cells(rooms: set[Room]) -> dict[Room, range]:
    """By room of the pool, the cells that it takes up: cut at every end of a room, the pool has
    cells that two rooms share, or do not, as a whole. A third room may lie across both of two that
    share nothing."""
    ends = {offset for offset, _ in rooms} | {offset + size for offset, size in rooms}
    number = {end: i for i, end in enumerate(sorted(ends))}
    return {room: range(number[room[0]], number[room[0] + room[1]]) for room in rooms}


@dataclass
class _Book:
    """Who used a resource last: the last writer, and readers since, the last of each lane."""

    writer: tuple[Lane, int] | None = None
    readers: dict[Lane, int] = field(default_factory=dict)

    def enter(self, lane: Lane, index: int, writes: bool, latest: dict[Lane, int]) -> None:
        if self.writer is not None:
            _later(latest, *self.writer)
        if not writes:
            self.readers[lane] = index
            return
        for other, place in self.readers.items():
            _later(latest, other, place)
        self.writer, self.readers = (lane, index), {}


def _later(latest: dict[Lane, int], lane: Lane, index: int) -> None:
    latest[lane] = max(index, latest.get(lane, -1))


class _Reader:
    """What actions of a schedule read and write."""

    def __init__(self, schedule: Schedule) -> None:
        self.first = schedule.first
        own = tuple((s,) for s in range(schedule.stages))
        self.residency = schedule.residency or Residency(own)
        self.role, self.schedule = schedule.role, schedule
        self.presence = Presence(self.residency, self.first)
        self.outdated = False
        self.cells = _cells(set(self.residency.rooms.values()))

    def uses(self, action: Action) -> Iterator[tuple[Resource, bool]]:
        """(resource, whether it is written), of the next action of the list."""
        residency = self.residency
        self.outdated = self.presence.outdated(action)
        self.presence.step(action)
        for name in residency.loads(action):
            yield ("rest", name), False
        for name in residency.stores(action):
            yield ("rest", name), True
        if action.kind in (Kind.SEND, Kind.RECV):
            whole = action.part == WHOLE  # parts are sent to others, who have one each
            if whole or action.kind is Kind.RECV:
                yield ("passed", whole, action.state, action.stage, action.microbatch), True
        elif action.kind is Kind.EXCHANGE:
            yield ("exchanged", action.state, action.microbatch), True
        elif action.kind is Kind.COPY:
            yield ("copied", action.microbatch), True
        elif action.kind in MOVES:
            yield from self._move(action)
        else:
            yield from self._compute(action)

    def _move(self, action: Action) -> Iterator[tuple[Resource, bool]]:
        if action.state is State.ACTIVATIONS:
            yield ("activations", action.stage, action.microbatch), True
        elif (
            action.kind not in (Kind.COLLECT, Kind.MERGE) and moved(action) in self.residency.rooms
        ):
            yield from self._room(moved(action), action.kind in COMES)

    def _room(self, name: Item, writes: bool) -> Iterator[tuple[Resource, bool]]:
        for cell in self.cells[self.residency.rooms[name]]:
            yield ("pool", cell), writes

    def _compute(self, action: Action) -> Iterator[tuple[Resource, bool]]:
        residency, s = self.residency, action.stage
        for name in residency.needs(action, self.first):
            yield from self._room(name, residency.changes(action, name))
        if action.microbatch != WHOLE and s in residency.spills:
            yield ("activations", s, action.microbatch), action.kind.way == "forward"
        if action.microbatch != WHOLE and self.schedule.copies:
            yield ("copied", action.microbatch), False
        if self.role is not None:
            m = action.microbatch
            if action.kind.way == "forward":
                yield ("passed", True, State.ACTIVATIONS, self.role.before(s, m), m), False
            elif action.kind.way == "back":
                yield ("passed", True, State.GRADIENTS, s, m), False
        if self.schedule.ends is not None:
            yield from self._ends(self.schedule.ends, action)
        if action.kind is Kind.NORM:
            yield ("norm",), True
        elif action.kind is Kind.UPDATE and not residency.direct:
            yield ("norm",), False
        if self.outdated:
            yield from self._room(Item(State.PARAMETERS, s), True)

    def _ends(self, ends: Ends, action: Action) -> Iterator[tuple[Resource, bool]]:
        """What an action takes of the ends of a path: sums of all workers, and a part's tensor."""
        state, m = self.schedule.exchanged(action), action.microbatch
        if state is not None:
            yield ("exchanged", state, m), False
        given = ends.given.get(action.kind)
        if given is not None:
            last = action.kind.end == "last"
            stage = self.schedule.end(m) if last else self.schedule.begin(m)
            yield ("passed", False, given, stage, m), False
