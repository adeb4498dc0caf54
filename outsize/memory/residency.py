"""Which items stay in the pool between two needs: policies under which streamed states are kept.

A step is a cycle of windows; window w needs some items together. Between two needs of an item lies
a gap: over it the item is either kept, which saves one fetch and holds its bytes, or let go. Since
the whole cycle is known, Belady's rule can be followed: what is needed farthest ahead goes first
(Fang et al., "PatrickStar", 2021, evicts chunks so, after a first step that records their use).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

import numpy as np

Item = Any  # hashable and with a text of its own: a string, or a value
Policy = Literal["belady", "lru", "static"]

_WARM = 2  # cycles before a policy's choices are read off: it starts with an empty pool


@dataclass(frozen=True)
class Gap:
    """Windows after `start` up to before `stop` (modulo the cycle; stop > start), between two needs
    of an item."""

    item: Item
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start - 1


def windows(
    visits: Sequence[Collection[Item]], ahead: int = 0, returned: int = 1
) -> list[frozenset[Item]]:
    """What must be present together: for each `returned` visits, their items and those of the
    visits up to `ahead` after the first of them (cyclic)."""
    count = len(visits)
    return [
        frozenset().union(*(visits[(v + i) % count] for i in range(min(ahead + 1, count))))
        for v in range(0, count, returned)
    ]


def needs(cycle: Sequence[Collection[Item]]) -> dict[Item, list[int]]:
    """Item -> the windows that need it, in order."""
    at: dict[Item, list[int]] = {}
    for w, window in enumerate(cycle):
        for item in window:
            if item in at:
                at[item].append(w)
        for item in sorted((item for item in window if item not in at), key=str):
            at[item] = [w]
    return at


def gaps(cycle: Sequence[Collection[Item]], made: Collection[Item] = ()) -> list[Gap]:
    """Every gap of every item, the last one of each around the end of the cycle; not that one for
    what each cycle makes anew."""
    count = len(cycle)
    return [
        Gap(item, a, b)
        for item, at in needs(cycle).items()
        for a, b in zip(at, [*at[1:], at[0] + count], strict=True)
        if b > a + 1 and (b < count or item not in made)
    ]


def kept(
    cycle: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    capacity: int,
    policy: Policy,
    made: Collection[Item] = (),
) -> list[Gap]:
    """Gaps over which the policy keeps its item in `capacity` bytes, the same in every cycle.

    Belady on a cycle that never ends may keep other items in each round; a layout is the same in
    all. So its choices count first, then whatever else fits, the shortest gaps first.
    """
    if policy == "static":
        return []
    every = gaps(cycle, made)
    hits = _hits(cycle, sizes, capacity, made, _lru if policy == "lru" else _belady)
    spread = _spread(every)
    order = sorted(every, key=lambda g: ((g.item, g.stop % len(cycle)) not in hits, *spread(g)))
    if policy == "lru":
        order = [g for g in order if (g.item, g.stop % len(cycle)) in hits]
    return fit(order, cycle, sizes, capacity)


def shortest(
    cycle: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    capacity: int,
    made: Collection[Item] = (),
) -> list[Gap]:
    """Gaps that fit when the shortest are taken first: the fewest bytes held for each saved."""
    every = gaps(cycle, made)
    return fit(sorted(every, key=_spread(every)), cycle, sizes, capacity)


def _spread(every: Sequence[Gap]) -> Callable[[Gap], tuple[int, int, float]]:
    """Sort key: by length; equal ones so that those taken lie evenly over the cycle, every second
    one first: what is kept leaves room in the windows around it, and fetches are far apart."""
    turn = (5**0.5 - 1) / 2
    rank = {item: i for i, item in enumerate(dict.fromkeys(g.item for g in every))}
    return lambda g: (g.length, rank[g.item] % 2, (rank[g.item] * turn) % 1)


def fit(
    order: Iterable[Gap],
    cycle: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    capacity: int,
) -> list[Gap]:
    """The gaps that fit into `capacity` beside all needs, when offered in this order."""
    count = len(cycle)
    # Twice around, so that a gap over the end of the cycle is one slice.
    held = np.tile([sum(sizes[i] for i in window) for window in cycle], 2)
    taken = []
    for gap in order:
        size = sizes[gap.item]
        if gap.length and held[gap.start + 1 : gap.stop].max() + size <= capacity:
            taken.append(gap)
            _hold(held, count, gap, size)
    return taken


def _hold(held: np.ndarray, count: int, gap: Gap, size: int) -> None:
    """Add a gap's bytes to both rounds of the doubled cycle."""
    start, stop = gap.start + 1, gap.stop
    held[start:stop] += size
    if stop > count:
        held[max(0, start - count) : stop - count] += size
    if start < count:
        held[start + count : min(stop + count, 2 * count)] += size


_Cycle = Sequence[Collection[Item]]
_Play = Callable[[_Cycle, Mapping[Item, int], int, Collection[Item], int], Iterable[set[Item]]]


def _hits(
    cycle: _Cycle, sizes: Mapping[Item, int], capacity: int, made: Collection[Item], play: _Play
) -> set[tuple[Item, int]]:
    """(item, window) of the needs that are met without a fetch, in the last of a few cycles."""
    fetched = list(play(cycle, sizes, capacity, made, _WARM + 1))[-len(cycle) :]
    return {(i, w) for w, window in enumerate(cycle) for i in window if i not in fetched[w]}


def _belady(
    cycle: _Cycle, sizes: Mapping[Item, int], capacity: int, made: Collection[Item], rounds: int
) -> Iterable[set[Item]]:
    """What each window fetches when the farthest next need is thrown out first."""
    count = len(cycle)
    after: list[dict[Item, int]] = [{} for _ in cycle]
    for item, at in needs(cycle).items():
        for a, b in zip(at, [*at[1:], at[0] + count], strict=True):
            after[a][item] = b - a if b < count or item not in made else rounds * count
    due: dict[Item, int] = {}  # resident items: when each is needed next
    heap: list[tuple[int, Item]] = []
    held = 0
    for now in range(rounds * count):
        window = cycle[now % count]
        missing = set(window) - due.keys()
        held += sum(sizes[item] for item in missing)
        for item in window:
            due[item] = now + after[now % count][item]
        while held > capacity and heap:
            when, item = heappop(heap)
            if due.get(item) == -when and item not in window:
                del due[item]
                held -= sizes[item]
        for item in window:
            heappush(heap, (-due[item], item))
        yield missing


def _lru(
    cycle: _Cycle, sizes: Mapping[Item, int], capacity: int, made: Collection[Item], rounds: int
) -> Iterable[set[Item]]:
    """What each window fetches when the least recently needed is thrown out first."""
    last = {item: at[-1] for item, at in needs(cycle).items() if item in made}
    recent: OrderedDict[Item, None] = OrderedDict()
    held = 0
    for now in range(rounds * len(cycle)):
        window = cycle[now % len(cycle)]
        missing = set(window) - recent.keys()
        for item in sorted(window, key=str):
            recent[item] = None
            recent.move_to_end(item)
        held += sum(sizes[item] for item in missing)
        while held > capacity and len(recent) > len(window):
            held -= sizes[recent.popitem(last=False)[0]]
        for item in window:
            if last.get(item) == now % len(cycle):  # used up: the next cycle makes it anew
                del recent[item]
                held -= sizes[item]
        yield missing
