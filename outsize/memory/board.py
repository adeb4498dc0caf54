"""Placing items in one line of bytes, each at one address over all the times it is resident.

Offline dynamic storage allocation: two items may share bytes unless they are resident in the same
window. Best fit, in an order that the caller chooses. Room that is lacking is made by giving up
gaps, over which an item was only kept to save a fetch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from outsize.memory.residency import Gap, Item, needs


class Board:
    """What is resident when, and which items may therefore not share bytes."""

    def __init__(
        self,
        cycle: Sequence[Collection[Item]],
        sizes: Mapping[Item, int],
        keep: Sequence[Gap],
        limit: int,
    ) -> None:
        self._sizes, self._limit, self._count = sizes, limit, len(cycle)
        at = needs(cycle)
        self.items = list(at)  # by first need
        self._needed = {item: _mask(windows) for item, windows in at.items()}
        self._gaps: dict[Item, list[Gap]] = {item: [] for item in at}
        for gap in sorted(keep, key=lambda g: g.length):
            self._gaps[gap.item].append(gap)
        self._over = {gap: self._gap_mask(gap) for gap in keep}
        self._resident = {item: self._span(item, self._gaps[item]) for item in at}
        self.spans = {item: mask.bit_count() for item, mask in self._resident.items()}
        self._beside = _neighbours(self._resident, self._count)

    def place(self, order: Iterable[Item]) -> dict[Item, int] | None:
        """Offsets of all items, each put in its turn into the smallest hole that holds it; None
        where one fits nowhere."""
        return _Placing(self).run(order)

    def _span(self, item: Item, gaps: Iterable[Gap]) -> int:
        mask = self._needed[item]
        for gap in gaps:
            mask |= self._over[gap]
        return mask

    def _gap_mask(self, gap: Gap) -> int:
        straight = (1 << gap.stop) - (1 << (gap.start + 1))
        whole = (1 << self._count) - 1
        return (straight & whole) | (straight >> self._count)


class _Placing:
    """One attempt to place all items of a board."""

    def __init__(self, board: Board) -> None:
        self._board, self._sizes, self._limit = board, board._sizes, board._limit
        self._resident = dict(board._resident)
        self._gaps = {item: list(gaps) for item, gaps in board._gaps.items() if gaps}
        self._changed: set[Item] = set()  # items that gave up gaps
        self._offsets: dict[Item, int] = {}

    def run(self, order: Iterable[Item]) -> dict[Item, int] | None:
        for item in order:
            offset = self._fit(item)
            if offset is None:
                offset = self._force(item)
            if offset is None:
                return None
            self._offsets[item] = offset
        return self._offsets

    def _fit(self, item: Item) -> int | None:
        """An offset where the item disturbs nobody, if need be without its longest gaps."""
        while True:
            offset = _best(self._taken(item), self._sizes[item], self._limit)
            if offset is not None or not self._gaps.get(item):
                return offset
            self._gaps[item].pop()
            self._shrink(item)

    def _taken(self, item: Item) -> list[tuple[int, int]]:
        """(start, stop) of placed items that are resident at a time when this one is."""
        mine, placed, changed = self._resident[item], self._offsets, self._changed
        mended = item in changed
        return sorted(
            (placed[other], placed[other] + self._sizes[other])
            for other in self._board._beside[item]
            if other in placed
            and (not (mended or other in changed) or mine & self._resident[other])
        )

    def _force(self, item: Item) -> int | None:
        """An offset that no need stands against, where the fewest bytes of kept items lie; they
        give up the gaps in the way."""
        mine = self._resident[item]
        beside = [o for o in self._board._beside[item] if o in self._offsets]
        hard = [o for o in beside if self._board._needed[o] & mine]
        soft = [o for o in beside if not self._board._needed[o] & mine and self._resident[o] & mine]
        best: tuple[int, int, list[Item]] | None = None
        for start in sorted({0, *(self._offsets[o] + self._sizes[o] for o in beside)}):
            stop = start + self._sizes[item]
            if stop <= self._limit and not self._under(hard, start, stop):
                lost = self._under(soft, start, stop)
                cost = sum(self._sizes[o] for o in lost)
                if best is None or cost < best[0]:
                    best = (cost, start, lost)
        if best is None:
            return None
        for other in best[2]:
            over = self._board._over
            self._gaps[other] = [g for g in self._gaps[other] if not over[g] & mine]
            self._shrink(other)
        return best[1]

    def _under(self, items: Iterable[Item], start: int, stop: int) -> list[Item]:
        at, sizes = self._offsets, self._sizes
        return [o for o in items if at[o] < stop and start < at[o] + sizes[o]]

    def _shrink(self, item: Item) -> None:
        self._changed.add(item)
        self._resident[item] = self._board._span(item, self._gaps[item])


def _best(taken: Sequence[tuple[int, int]], size: int, limit: int) -> int | None:
    """Start of the smallest hole of at least `size` between taken ranges (sorted), or above."""
    found, smallest, top = None, limit + 1, 0
    for start, stop in taken:
        if size <= start - top < smallest:
            found, smallest = top, start - top
        top = max(top, stop)
    if found is None and top + size <= limit:
        return top
    return found


def _mask(windows: Iterable[int]) -> int:
    return sum(1 << w for w in windows)


def _neighbours(resident: Mapping[Item, int], count: int) -> dict[Item, list[Item]]:
    """For each item those that are resident in one of its windows."""
    width = (count + 63) // 64 * 8
    names = list(resident)
    packed = b"".join(mask.to_bytes(width, "little") for mask in resident.values())
    words = np.frombuffer(packed, np.uint64).reshape(len(names), -1).T.copy()
    beside: dict[Item, list[Item]] = {}
    for number, name in enumerate(names):
        mine = words[:, number]
        used = np.flatnonzero(mine)
        meets = np.flatnonzero(np.any(words[used] & mine[used, None], axis=0))
        beside[name] = [names[i] for i in meets if i != number]
    return beside
