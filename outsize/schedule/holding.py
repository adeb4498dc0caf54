"""What a schedule holds where, for the validator: newest bytes, stale ones, bytes about to be lost.

Every item has a version: how often it was changed. The pool and the tier each have the version they
were given last. An action is refused that would compute with stale bytes, fetch stale ones, throw
the only copy of newer ones out, or find its activations away.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.residency import Item, Residency, item, moved, overlap

_PASSES = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Holding:
    """The pool and the tiers while a schedule's list is gone through."""

    def __init__(self, residency: Residency, last: int, first: int) -> None:
        self.residency, self._last, self._first = residency, last, first
        self._newest: dict[Item, int] = {}
        self._tier: dict[Item, int] = {}
        self._pool: dict[Item, int] = dict.fromkeys(residency.start, 0)
        self._begun: set[Item] = set()  # gradients of this step
        self._spent: set[Item] = set()  # gradients that the update has had
        self._unwritten: dict[Item, set[int]] = {}  # parts whose new parameters are not written
        self._away: set[tuple[int, int]] = set()  # activations that have left

    def step(self, action: Action) -> str:
        """Go past an action; gives the reason why it cannot run, or nothing."""
        if action.kind in (Kind.FETCH, Kind.EVICT):
            return self._move(action)
        return self._compute(action)

    # -- moves ----------------------------------------------------------------------------------

    def _move(self, action: Action) -> str:
        if action.state is State.ACTIVATIONS:
            return self._activations(action)
        name = moved(action)
        if name not in self.residency.rooms:
            return f"moves {name}, which has no room in the pool"
        return self._fetch(action, name) if action.kind is Kind.FETCH else self._evict(action, name)

    def _activations(self, action: Action) -> str:
        here = (action.stage, action.microbatch)
        if action.stage not in self.residency.spills:
            return "moves activations that stay on the device"
        if (action.kind is Kind.FETCH) != (here in self._away):
            return "moves activations that are not there"
        (self._away.discard if action.kind is Kind.FETCH else self._away.add)(here)
        return ""

    def _fetch(self, action: Action, name: Item) -> str:
        for needed in self.residency.loads(action):
            if self._tier.get(needed, 0) != self._newest.get(needed, 0):
                return f"reads {needed}, whose newest bytes are not on its tier"
            if needed.startswith(State.GRADIENTS) and needed not in self._begun:
                return f"reads {needed}, which no backward pass has made in this step"
            if self._unwritten.get(needed):
                return f"reads {needed}, of which parts are not written yet"
        reason = self._enter(name)
        self._pool[name] = self._newest.get(name, 0)
        return reason

    def _enter(self, name: Item) -> str:
        """Throw out what shares the room of an item."""
        rooms = self.residency.rooms
        for other in [o for o in self._pool if overlap(rooms[o], rooms[name])]:
            version = self._pool.pop(other)
            if version > self._tier.get(other, 0) and other not in self._spent:
                return f"would lose {other}, whose newest bytes are nowhere else"
        return ""

    def _evict(self, action: Action, name: Item) -> str:
        if name not in self._pool:
            return f"writes {name}, which is not in the pool"
        self._tier[name] = self._pool[name]
        for other in self.residency.stores(action)[1:]:
            parts = self._unwritten.get(other, set())
            parts.discard(action.part)
            if not parts:
                self._tier[other] = self._newest.get(other, 0)
        return ""

    # -- computing ------------------------------------------------------------------------------

    def _compute(self, action: Action) -> str:
        if action.kind in _PASSES and (action.stage, action.microbatch) in self._away:
            return "its activations are not there"
        if action.kind is Kind.UPDATE and action.lane is Lane.HOST:
            reason = self._fresh(self.residency.loads(action))
            return reason or self._outdate(action)
        for name in self.residency.needs(action, self._last, self._first):
            reason = self._need(action, name)
            if reason:
                return reason
        return self._outdate(action)

    def _fresh(self, names: tuple[Item, ...]) -> str:
        for name in names:
            if self._tier.get(name, 0) != self._newest.get(name, 0):
                return f"reads {name}, whose newest bytes are not on its tier"
        return ""

    def _need(self, action: Action, name: Item) -> str:
        residency = self.residency
        if name not in residency.rooms:
            return f"needs {name}, which has no room in the pool"
        if residency.adds(action, name) and name not in self._begun:
            reason = self._enter(name)
            if reason:
                return reason
            self._pool[name] = self._newest[name] = self._tier.get(name, 0)
            self._begun.add(name)
        if self._pool.get(name) != self._newest.get(name, 0):
            return f"needs {name}, which is not in the pool as it is now"
        if residency.changes(action, name):
            self._newest[name] = self._pool[name] = self._newest.get(name, 0) + 1
        if residency.consumes(action, name):
            self._spent.add(name)
        return ""

    def _outdate(self, action: Action) -> str:
        """A part's update changes parameters that rest below."""
        residency = self.residency
        if action.kind is not Kind.UPDATE or action.part == WHOLE or residency.direct:
            return ""
        name = item(State.PARAMETERS, action.stage)
        if action.stage not in residency.parameters:
            return ""
        self._newest[name] = self._newest.get(name, 0) + 1
        on_host = action.lane is Lane.HOST
        if on_host:
            self._tier[name] = self._newest[name]
            self._pool.pop(name, None)
        elif name in self._pool:
            self._pool[name] = self._newest[name]
        if not on_host:
            self._unwritten.setdefault(name, set()).add(action.part)
        return ""

    # -- the end --------------------------------------------------------------------------------

    def left(self) -> Iterator[str]:
        """What a whole step leaves undone."""
        for name, version in sorted(self._pool.items()):
            gone = name in self._spent or name.startswith(State.GRADIENTS)
            if version > self._tier.get(name, 0) and not gone and not self._covered(name):
                yield f"the newest bytes of {name} were not written"
        for name, parts in self._unwritten.items():
            if parts:
                yield f"new parameters of {name} were not written"

    def _covered(self, name: Item) -> bool:
        """Parameters that the pool holds beside parts that were written."""
        return name in self._unwritten and not self._unwritten[name]
