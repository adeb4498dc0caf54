"""Local search on a layout of the pool: an item moves where the traffic of a cycle falls.

An item is fetched again after a gap between two of its visits where something that shares bytes
with it was visited meanwhile. That is a sum over pairs but for gaps broken twice, so what a move
changes is found from the items under the old and the new place alone.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence

from outsize.memory.residency import Item, needs

_ROUNDS = 6


class Refiner:
    """What each item does to the others in a cycle of visits, and which may never share bytes."""

    def __init__(
        self,
        visits: Sequence[Collection[Item]],
        cycle: Sequence[Collection[Item]],
        sizes: Mapping[Item, int],
        limit: int,
        made: Collection[Item] = (),
    ) -> None:
        self._sizes, self._limit = sizes, limit
        at = needs(visits)
        self._broken = {item: _broken(item, at, len(visits), item in made) for item in at}
        self._hard: dict[Item, set[Item]] = {item: set() for item in at}
        for window in cycle:
            for item in window:
                self._hard[item].update(window)

    def run(self, offsets: Mapping[Item, int]) -> dict[Item, int]:
        """Offsets from which no single move, and no move that pushes others away, saves bytes."""
        placed = dict(offsets)
        order = sorted(placed, key=lambda i: -self._sizes[i])
        for _ in range(_ROUNDS):
            moved = [item for item in order if self._move(item, placed) or self._push(item, placed)]
            if not moved:
                break
        return placed

    def _move(self, item: Item, placed: dict[Item, int]) -> bool:
        """Put one item where the traffic is least; whether it moved."""
        before = self._sum(item, placed, placed[item])
        start, cost = self._best(item, placed)
        if start is None or cost >= before:
            return False
        placed[item] = start
        return True

    def _push(self, item: Item, placed: dict[Item, int]) -> bool:
        """Put one item anywhere, those under it each at its best elsewhere; whether that helped."""
        if not self._cost(item, placed, self._under(item, placed, placed[item])):
            return False  # it is never fetched again as it lies
        for start in self._starts(item, placed):
            under = self._under(item, placed, start)
            if not under or len(under) > 3:
                continue
            touched = {item, *under}
            touched.update(*(self._under(i, placed, placed[i]) for i in (item, *under)))
            trial = {i: s for i, s in placed.items() if i not in under} | {item: start}
            if not self._settle(under, trial):
                continue
            for i in (item, *under):
                touched.update(self._under(i, trial, trial[i]))
            if self._total(touched, trial) < self._total(touched, placed):
                placed.update(trial)
                return True
        return False

    def _settle(self, items: Iterable[Item], trial: dict[Item, int]) -> bool:
        for item in items:
            start, _ = self._best(item, trial)
            if start is None:
                return False
            trial[item] = start
        return True

    def _best(self, item: Item, placed: Mapping[Item, int]) -> tuple[int | None, int]:
        """The start with the least traffic of this item and those under it, the lowest such."""
        found, least = None, 0
        for start in self._starts(item, placed):
            if self._hard[item].isdisjoint(self._under(item, placed, start)):
                cost = self._sum(item, placed, start)
                if found is None or cost < least:
                    found, least = start, cost
        return found, least

    def _starts(self, item: Item, placed: Mapping[Item, int]) -> list[int]:
        """Places worth trying: against an end of another item."""
        size, sizes = self._sizes[item], self._sizes
        starts = {0}
        for other, start in placed.items():
            if other != item:
                starts |= {start, start + sizes[other], start - size, start + sizes[other] - size}
        return sorted(s for s in starts if 0 <= s <= self._limit - size)

    def _sum(self, item: Item, placed: Mapping[Item, int], start: int) -> int:
        """Bytes fetched again because of this item: of its own, and of others but for it."""
        under = self._under(item, placed, start)
        total = self._cost(item, placed, under)
        for other in under:
            rest = [o for o in self._under(other, placed, placed[other]) if o != item]
            total += self._cost(other, placed, [*rest, item]) - self._cost(other, placed, rest)
        return total

    def _total(self, items: Iterable[Item], placed: Mapping[Item, int]) -> int:
        return sum(self._cost(i, placed, self._under(i, placed, placed[i])) for i in items)

    def _cost(self, item: Item, placed: Mapping[Item, int], under: Iterable[Item]) -> int:
        broken = 0
        for other in under:
            broken |= self._broken[item].get(other, 0)
        return broken.bit_count() * self._sizes[item]

    def _under(self, item: Item, placed: Mapping[Item, int], start: int) -> list[Item]:
        """Items that share bytes with this one when it lies at `start`."""
        stop, sizes = start + self._sizes[item], self._sizes
        return [o for o, s in placed.items() if s < stop and start < s + sizes[o] and o != item]


def _broken(item: Item, at: Mapping[Item, list[int]], count: int, made: bool) -> dict[Item, int]:
    """Other item -> the gaps of this one, as bits, in which the other is visited; the last gap,
    around the end of the cycle, counts for nothing where each cycle makes the item anew."""
    mine = at[item]
    gap_of = [(bisect(mine, visit) - 1) % len(mine) for visit in range(count)]
    counted = (1 << (len(mine) - made)) - 1
    found = {}
    for other, visits in at.items():
        if other != item:
            bits = sum({1 << gap_of[visit] for visit in visits})
            found[other] = bits & counted
    return found
