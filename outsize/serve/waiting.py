"""Who waits for a slot: in the order of coming, by who asks, and by any rank that changes with the
clock. Each is kept while requests come and go, so that a step costs what has changed, however many
wait. No tensors."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Waiting(NamedTuple):
    """A request that has no slot. key: its own; tokens: that wait to be fed; start: tokens in
    pages; first: foretold seconds of a step of its whole prompt; came, last: seconds of the clock,
    of its coming and of its last token (-1: none); spent: foretold seconds of the steps that fed
    it; owner: who asks."""

    key: int
    tokens: int
    start: int = 0
    first: float = 0.0
    came: float = 0.0
    last: float = -1.0
    spent: float = 0.0
    owner: str = ""


class Rank(NamedTuple):
    """The lowest go first, then those of the lowest order, then those who came first. until: of
    the clock, up to which the level surely stays while a request waits."""

    level: int
    order: float = 0.0
    until: float = math.inf


Ranked = tuple[int, float, int]  # level, order, key
Ranks = Callable[..., Rank]  # of a request, the seconds of the clock, and what else it asks


class Queue:
    """tokens: that wait in all. A request that waits does not change."""

    def __init__(self, some: Iterable[Waiting] = ()) -> None:
        self.tokens = 0
        self._all = dict[int, Waiting]()
        self._keys = list[int]()
        self._owners = dict[str, list[int]]()
        self._levels: _Levels | None = None
        for one in some:
            self.add(one)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of coming."""
        return map(self._all.__getitem__, self._keys)

    def __getitem__(self, key: int) -> Waiting:
        return self._all[key]

    @property
    def owners(self) -> Mapping[str, list[int]]:
        """Keys of each owner's requests, in the order of coming; none of who has none."""
        return self._owners

    def add(self, one: Waiting) -> None:
        self._all[one.key] = one
        insort(self._keys, one.key)
        insort(self._owners.setdefault(one.owner, []), one.key)
        self.tokens += one.tokens
        if self._levels is not None:
            self._levels.add(one)

    def remove(self, key: int) -> None:
        one = self._all.pop(key)
        self.tokens -= one.tokens
        own = self._owners[one.owner]
        for keys in (self._keys, own):
            del keys[bisect_left(keys, key)]
        if not own:
            del self._owners[one.owner]
        if self._levels is not None:
            self._levels.remove(key)

    def lowest(self, count: int, now: float, ranks: Ranks, *about: Any) -> list[Ranked]:
        """So many of the lowest rank, sorted. ranks: asked of (request, now, *about) when one comes
        and when a rank's time is over; now: never earlier than before."""
        levels = self._levels
        if levels is None or levels.ranks is not ranks or levels.about != about:
            levels = self._levels = _Levels(ranks, about)
            for one in self:
                levels.add(one)
        return levels.lowest(count, now)


class _Levels:
    """Requests by level: of each a list that is sorted."""

    def __init__(self, ranks: Ranks, about: tuple[Any, ...]) -> None:
        self.ranks, self.about = ranks, about
        self._levels = dict[int, list[tuple[float, int]]]()  # order, key
        self._held = dict[int, tuple[Waiting, Rank]]()
        self._due = list[tuple[float, int]]()
        self._new = dict[int, Waiting]()

    def add(self, one: Waiting) -> None:
        self._new[one.key] = one  # its rank is asked by the clock of the next step

    def remove(self, key: int) -> None:
        if self._new.pop(key, None) is None:
            _, rank = self._held.pop(key)
            level = self._levels[rank.level]
            del level[bisect_left(level, (rank.order, key))]
            if not level:
                del self._levels[rank.level]

    def lowest(self, count: int, now: float) -> list[Ranked]:
        while self._due and self._due[0][0] <= now:
            until, key = heapq.heappop(self._due)
            held = self._held.get(key)
            if held is not None and held[1].until == until:
                self.remove(key)
                self._new[key] = held[0]
        for one in self._new.values():
            rank = self.ranks(one, now, *self.about)
            self._held[one.key] = one, rank
            insort(self._levels.setdefault(rank.level, []), (rank.order, one.key))
            if rank.until < math.inf:
                heapq.heappush(self._due, (rank.until, one.key))
        self._new.clear()
        found = list[Ranked]()
        for level in sorted(self._levels):
            if len(found) >= count:
                break
            some = self._levels[level][: count - len(found)]
            found += [(level, *each) for each in some]
        return found
