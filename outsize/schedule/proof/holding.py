"""What a schedule holds where, for the validator: newest bytes, stale ones, bytes about to be lost.

A cell is one part of one state of a stage: what is updated at once. It has a version, how often it
was changed, and every copy of it, on its tier or in a room of the pool, has the version that it was
given last. An action is refused that would compute with stale bytes, move stale ones, throw the
only copy of newer ones out, or find its activations away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.item import Item
from outsize.schedule.proof.sums import Sums
from outsize.schedule.residency import MOVES, Residency, moved, overlap

Cell = tuple[State, int, int]  # state, stage, part
_PASSES = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)
_NOTHING = -1  # the version of bytes that nobody has written


@dataclass(frozen=True)
class Cells:
    """Which cells an item has."""

    residency: Residency

    def of(self, name: Item) -> tuple[Cell, ...]:
        """What an item's room holds."""
        state, s, part = name
        if part == WHOLE:
            return tuple((state, s, p) for p in range(max(1, self.residency.parts.get(s, 0))))
        return ((state, s, part), *self.bundled(s, part))

    def bundled(self, s: int, part: int) -> Iterator[Cell]:
        """What comes and goes with a part of the optimizer states: what workers cut does not."""
        for state in (State.PARAMETERS, State.GRADIENTS):
            if self.residency.bundled(Item(state, s)):
                yield (state, s, part)

    def loaded(self, cell: Cell, name: Item) -> bool:
        """Whether a FETCH of an item reads this cell: not the weights that a master copy makes."""
        bundled = name.state is State.OPTIMIZER and cell[0] is State.PARAMETERS
        return not bundled or cell[1] in self.residency.own

    def read(self, action: Action, name: Item) -> Iterator[Cell]:
        """The cells of an item that an action computes with."""
        for cell in self.of(name):
            if action.kind is not Kind.UPDATE or (
                action.part in (WHOLE, cell[2]) and self.loaded(cell, name)
            ):
                yield cell


class Holding:
    """The pool and the tiers while a schedule's list is gone through."""

    def __init__(self, residency: Residency, first: int) -> None:
        self.residency, self._first = residency, first
        self._cells = Cells(residency)
        self._newest: dict[Cell, int] = {}
        self._tier: dict[Cell, int] = {}
        self._pool = {name: dict.fromkeys(self._cells.of(name), 0) for name in residency.start}
        self._shares: dict[Item, dict[Cell, int]] = {}  # in rooms, of what workers cut
        self._begun: set[Item] = set()  # gradients of this step
        self._spent: set[Cell] = set()  # gradients that the update has had
        self._kept: set[tuple[int, int]] = set()  # activations that wait for a pass, and of these
        self._away: set[tuple[int, int]] = set()  # those that have left
        self._made: set[tuple[int, int]] = set()  # activations of this step
        self._sums = Sums(residency, first)

    def begin(self) -> str:
        """Why the schedule cannot begin with what it expects to find, or nothing."""
        rooms = self.residency.rooms
        for name in sorted(self.residency.start):
            if name.state is not State.PARAMETERS or name not in rooms:
                return f"begins with {name}; expected parameters that have a room"
            if any(o != name and overlap(rooms[o], rooms[name]) for o in self.residency.start):
                return f"begins with {name}, whose room is another's too"
        return ""

    def step(self, action: Action) -> str:
        """Go past an action; gives the reason why it cannot run, or nothing."""
        reason = self._sums.step(action)
        if not reason:
            reason = self._move(action) if action.kind in MOVES else self._compute(action)
        return reason

    # -- cells ----------------------------------------------------------------------------------

    def _now(self, cell: Cell) -> int:
        return self._newest.get(cell, 0)

    def _change(self, cell: Cell) -> int:
        self._newest[cell] = self._now(cell) + 1
        return self._newest[cell]

    # -- moves ----------------------------------------------------------------------------------

    def _move(self, action: Action) -> str:
        if action.state is State.ACTIVATIONS:
            return self._activations(action)
        name = moved(action)
        if action.kind in (Kind.COLLECT, Kind.MERGE) or (
            action.kind is Kind.REDUCE and action.stage not in self.residency.gradients
        ):
            return ""  # not in the pool
        if name not in self.residency.rooms:
            return f"moves {name}, which has no room in the pool"
        if action.kind is Kind.REDUCE:
            return self._reduce(name)
        if action.kind is Kind.EVICT:
            return self._evict(name)
        if action.kind is Kind.GATHER and self.residency.shared(name):
            return self._gather(name)
        return self._fetch(name)

    def _gather(self, name: Item) -> str:
        """The others' shares come to this worker's, which is in the room."""
        cells = self._shares.pop(name, {})
        if not cells or any(version != self._now(cell) for cell, version in cells.items()):
            return f"gathers {name}, of which this worker's share is not in its room as it is now"
        self._pool[name] = cells
        return ""

    def _reduce(self, name: Item) -> str:
        """Partial sums leave the pool for their shards; what comes next begins with zeros."""
        cells = self._pool.pop(name, None)
        if cells is None:
            return f"sums {name}, which is not in the pool"
        if self.residency.shared(name):  # the sum is in the room still, until its EVICT
            self._shares[name] = cells
            return ""
        for cell, version in cells.items():
            if self._tier.get(cell, 0) == version:
                return f"sums {name} a second time"
            self._tier[cell] = version
        return ""

    def _activations(self, action: Action) -> str:
        here = (action.stage, action.microbatch)
        if action.stage not in self.residency.spills:
            return "moves activations that stay on the device"
        if here not in self._made:
            return "moves activations that are not there: it comes before its FORWARD"
        if here not in self._kept:
            return "its gradient was produced already; nobody asks for its activations"
        away = here in self._away
        if (action.kind is Kind.FETCH) != away:
            return f"its activations are {'' if away else 'not '}away"
        (self._away.discard if away else self._away.add)(here)
        return ""

    def _fetch(self, name: Item) -> str:
        cells = self._cells.of(name)
        for cell in cells:
            reason = self._resting(cell) if self._cells.loaded(cell, name) else ""
            if reason:
                return reason
        reason = self._enter(name)
        part = name.state is State.PARAMETERS and self.residency.shared(name)
        (self._shares if part else self._pool)[name] = {
            cell: self._now(cell) if self._cells.loaded(cell, name) else _NOTHING for cell in cells
        }
        return reason

    def _resting(self, cell: Cell) -> str:
        """Why what is on the tier cannot be read, or nothing."""
        name = Item(cell[0], cell[1])
        if cell[0] is State.GRADIENTS and name not in self._begun:
            return f"reads {name}, which no backward pass has made in this step"
        if self._tier.get(cell, 0) != self._now(cell):
            return f"reads {name}, whose newest bytes are not on its tier"
        return ""

    def _enter(self, name: Item) -> str:
        """Throw out what shares the room of an item."""
        rooms = self.residency.rooms
        for held in (self._pool, self._shares):
            for other in [o for o in held if overlap(rooms[o], rooms[name])]:
                cells = held.pop(other)
                if any(self._only(cell, version) for cell, version in cells.items()):
                    return f"would lose {other}, whose newest bytes are nowhere else"
        return ""

    def _only(self, cell: Cell, version: int) -> bool:
        """Whether a copy that is no longer in the pool was the only one of the newest bytes."""
        if version != self._now(cell) or cell in self._spent:
            return False
        elsewhere = (held.get(cell) for held in self._pool.values())
        return self._tier.get(cell, 0) != version and version not in elsewhere

    def _evict(self, name: Item) -> str:
        shared = self.residency.shared(name)
        held = self._shares if shared else self._pool
        if name not in held:
            return f"writes {name}, which is not in the pool" + " summed" * shared
        stage = self._cells.of(name)[0][1]
        if name.state is State.PARAMETERS and stage in self.residency.fixed:
            return f"writes {name}, which is frozen"
        for cell, version in held[name].items():
            if cell[0] is State.GRADIENTS and name.state is not State.GRADIENTS:
                continue
            if version != self._now(cell):
                return f"writes {name}, which is not in the pool as it is now"
            self._tier[cell] = version
        return ""

    # -- computing ------------------------------------------------------------------------------

    def _compute(self, action: Action) -> str:
        here = (action.stage, action.microbatch)
        if action.kind.way == "forward" and action.stage >= self._first:
            self._kept.add(here)
            self._made.add(here)
        if action.kind in _PASSES:
            self._kept.discard(here)
            if here in self._away:
                return "its activations are away; expected a FETCH before it"
        if action.kind is Kind.UPDATE and action.lane is Lane.HOST:
            return self._at_rest(action)
        needed = tuple(self.residency.needs(action, self._first))
        reasons = (self._need(action, name) for name in needed)
        reason = next(filter(None, reasons), "")
        lost = [name for name in needed if name not in self._pool]
        if not reason and lost:
            reason = f"needs {lost[0]}, whose room is that of something else that it needs"
        if not reason and action.kind is Kind.UPDATE:
            self._updated(action, needed)
        if not reason and action.kind in (Kind.NORM, Kind.UPDATE):
            reason = self._waiting(action)
        return reason

    def _waiting(self, action: Action) -> str:
        """Which gradients in the pool are not in their sum, that an action reads; or nothing."""
        summed = self.residency.summed & self.residency.gradients
        for s in summed if action.kind is Kind.NORM else summed & {action.stage}:
            for cell in self._cells.of(Item(State.GRADIENTS, s)):
                if self._tier.get(cell, 0) != self._now(cell):
                    return f"needs gradients {s}, which were not summed over the workers"
        return ""

    def _need(self, action: Action, name: Item) -> str:
        """Why an item cannot be computed with, or nothing."""
        residency = self.residency
        if name not in residency.rooms:
            return f"needs {name}, which has no room in the pool"
        fresh = name not in self._begun or (residency.anew(name) and name not in self._pool)
        if residency.adds(action, name) and fresh:
            if reason := self._enter(name):
                return reason
            if any(self._tier.get(cell, 0) != self._now(cell) for cell in self._cells.of(name)):
                return f"would begin {name} anew, whose last ones were not summed"
            self._begun.add(name)
            self._pool[name] = {cell: self._now(cell) for cell in self._cells.of(name)}
        held = self._pool.get(name, {})
        for cell in self._cells.read(action, name):
            if held.get(cell) != self._now(cell):
                return f"needs {name}, which is not in the pool as it is now"
            if residency.adds(action, name):
                held[cell] = self._change(cell)
        return ""

    def _updated(self, action: Action, needed: tuple[Item, ...]) -> None:
        """An update on the device: new versions of what it changes, wherever it writes them."""
        s = action.stage
        parts = range(max(1, self.residency.parts.get(s, 0)))
        for part in parts if action.part == WHOLE else (action.part,):
            self._spent.add((State.GRADIENTS, s, part))
            own = (State.PARAMETERS, s, part)
            cut = s in self.residency.gathered
            if cut and (action.part == WHOLE or not self.residency.shared(Item(*own[:2]))):
                self._tier[own] = self._change(own)
            for state in (State.PARAMETERS, State.OPTIMIZER):
                cell = (state, s, part)
                homes = [name for name in needed if cell in self._pool[name]]
                same = Item(State.PARAMETERS, s)  # the pool may hold the parameters still
                if homes and state is State.PARAMETERS and same in self._pool and not cut:
                    homes.append(same)
                if homes:
                    version = self._change(cell)
                    for name in homes:
                        self._pool[name][cell] = version

    def _at_rest(self, action: Action) -> str:
        """An update of what rests in memory, there."""
        s, part = action.stage, action.part
        if s not in self.residency.hosts:
            return "is on the host; expected compute: its states do not rest in memory"
        for cell in ((State.OPTIMIZER, s, part), *self._cells.bundled(s, part)):
            if cell[0] is State.PARAMETERS and s not in self.residency.own:
                continue
            reason = self._resting(cell)
            if reason:
                return reason
        self._spent.add((State.GRADIENTS, s, part))
        for cell in ((State.OPTIMIZER, s, part), *self._cells.bundled(s, part)):
            if cell[0] is not State.GRADIENTS:
                self._tier[cell] = self._change(cell)
        return ""

    # -- the end --------------------------------------------------------------------------------

    def left(self) -> Iterator[str]:
        """What a whole step leaves undone."""
        for cell, version in sorted(self._newest.items()):
            if cell[0] is not State.GRADIENTS and self._tier.get(cell, 0) != version:
                yield f"the newest bytes of {Item(*cell[:2])} were not written"
        yield from self._sums.left()
        for name in sorted(self.residency.start):
            held = self._pool.get(name, {})
            if any(held.get(cell) != self._now(cell) for cell in self._cells.of(name)):
                yield f"the pool does not hold {name}, with which the next step begins"
