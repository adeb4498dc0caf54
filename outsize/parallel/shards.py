"""Shards: which elements of a flat buffer each worker of the data axis holds, kind by kind.

Parameters, gradients and optimizer states are each cut over neighbours: over p, g and o workers
where p divides g divides o divides all N. Cuts nest: the part of a worker's parameters that it
updates lies within them. So parameters may be whole on every machine (p = workers of a machine)
while the rest is cut over all of them. ZeRO's stages 1 to 3 are (1, 1, N), (1, N, N), (N, N, N)
(Rajbhandari et al., 2019), hybrid sharding (h, h, h), InternEvo's degrees (Chen et al., 2024) any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
Cutter = Callable[[int, int, int], tuple[int, ...]]  # first, last, parts -> parts + 1 offsets


def even(first: int, last: int, parts: int) -> tuple[int, ...]:
    """Offsets of parts as equal as they can be, without padding."""
    return tuple(first + (last - first) * i // parts for i in range(parts + 1))


def at_borders(marks: Mapping[int, int], grain: int = 0, open: Collection[int] = ()) -> Cutter:
    """A cutter that cuts next to where `even` would, and only where parameters begin or, in those
    that begin at `open` places, at multiples of `grain` from there. marks: by where parameters
    begin, the end among them, the same place in whole parameters, by which parts are even: workers
    that hold uneven parts of parameters cut at the same ones."""
    places = sorted(marks)
    ends = [marks[place] for place in places]

    def mark(place: int) -> int:
        at = bisect_right(places, place) - 1
        return ends[at] + place - places[at]

    def inside(wanted: int) -> Iterator[int]:
        """The places next to a mark, inside of the parameter where it is."""
        at = bisect_right(ends, wanted) - 1
        if places[at] in open:
            lower = places[at] + (wanted - ends[at]) // grain * grain
            yield from (lower, min(lower + grain, places[at + 1]))

    def cut(first: int, last: int, parts: int) -> tuple[int, ...]:
        wanted = even(mark(first), mark(last), parts)
        made = []
        for one in wanted:
            known = sorted({first, last, *places, *inside(one)})
            near = (e for e in known if first <= e <= last)
            made.append(min(near, key=lambda e: abs(mark(e) - one)))
        return tuple(made)

    return cut


@dataclass(frozen=True)
class Level:
    """One digit of a worker's place on the data axis: its group is `count` workers that lie `inner`
    apart, of which it is number `digit`."""

    inner: int
    count: int
    digit: int


@dataclass(frozen=True)
class Shards:
    """What the worker at `index` of `size` holds, where parameters, gradients and optimizer states
    are cut over so many neighbours."""

    parameters: int
    gradients: int
    optimizer: int
    size: int
    index: int

    @property
    def levels(self) -> tuple[Level, Level, Level, Level]:
        """The digits: within the parameters' shards, within the gradients' beyond them, within the
        optimizer states' beyond those, and among workers that hold the same of everything."""
        ends = (1, self.parameters, self.gradients, self.optimizer, self.size)
        a, b, c, d = (
            Level(inner, outer // inner, self.index // inner % (outer // inner))
            for inner, outer in pairwise(ends)
        )
        return a, b, c, d

    def span(self, numel: int, depth: int, cut: Cutter = even, index: int | None = None) -> Span:
        """What lies here of `numel` elements at a depth: 0 all, 1 as parameters are cut, 2 as
        gradients, 3 as optimizer states. index: of another worker."""
        at = self.index if index is None else index
        first, last = 0, numel
        for level in self.levels[:depth]:
            offsets = cut(first, last, level.count)
            digit = at // level.inner % level.count
            first, last = offsets[digit], offsets[digit + 1]
        return first, last

    def neighbours(self, outer: int, inner: int = 1) -> Iterator[int]:
        """The places of the workers that differ from this one in its place among `outer`
        neighbours, in steps of `inner`: the group of one collective."""
        zero = self.index - self.index % outer + self.index % inner
        return iter(range(zero, zero + outer, inner))
