"""The layout of the one pool through which streamed states pass, found before the run.

Every item has one address for ever, so that views of it never move; items that are not needed at
the same time share bytes, and bringing one in throws out what lies in its place, as in a
direct-mapped cache. A policy says first what stays between two needs (residency.py); then items
are placed, such that no two lie in the same bytes while both are resident. What does not fit gives
up its longest gaps. Several orders are tried, and the traffic of each is measured by playing it.

Sources: Fang et al., "PatrickStar", 2021 (chunks of any state in one space, Belady's rule);
Abbasi et al., "Superpipeline", 2024 (blocks resident and given back at a time).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from outsize.errors import OutsizeError, counted
from outsize.memory.board import Board
from outsize.memory.refine import Refiner
from outsize.memory.residency import (
    Gap,
    Item,
    Policy,
    gaps,
    kept,
    shortest,
    windows,
)
from outsize.memory.sizes import format_bytes

__all__ = ["Arrangement", "Item", "Policy", "Traffic", "arrange", "least", "traffic"]

_LOGICAL = (1.0, 0.95, 0.9, 0.8)  # of the capacity, for the policy: the rest is slack for placing
_MANY = 500  # items above which fewer layouts are tried, and
_NEAR = 1.01  # times the traffic that a policy promises is near enough
_STRIDES = 12
_FEW = 48  # items up to which a layout is refined by local search: it takes the square of them


@dataclass(frozen=True)
class Arrangement:
    """offsets: byte offset of each item in the pool, the same throughout; extent: bytes used."""

    offsets: Mapping[Item, int]
    extent: int


@dataclass(frozen=True)
class Traffic:
    """Bytes and number of fetches in one cycle, once it has run before."""

    fetched: int
    fetches: int


def arrange(
    visits: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    capacity: int,
    ahead: int = 1,
    returned: int = 1,
    policy: Policy = "belady",
    align: int = 4096,
    made: Collection[Item] = (),
) -> Arrangement:
    """Addresses for the items of a cyclic list of visits in a pool of `capacity` bytes.

    ahead: visits that are fetched before their turn; returned: visits whose items are given back
    at a time. Items of one such window never share bytes. made: items that every cycle makes anew
    at their first visit, such as gradients: nothing keeps them over the end of the cycle.
    OutsizeError: capacity below `least`.
    """
    _check(ahead, returned, policy)
    cycle = windows(visits, ahead, returned)
    rounded = _rounded(cycle, sizes, align)
    if not rounded:
        return Arrangement({}, 0)
    base = _static(cycle, rounded)
    limit = capacity // align * align
    if base.extent > limit:
        raise OutsizeError(
            f"pool of {format_bytes(capacity)} is {counted(base.extent - capacity, 'byte', ',')}"
            " short of"
            f" {base.extent:,} bytes, the least that holds {counted(ahead + 1, 'visit')} at once;"
            " give more memory or fetch fewer visits ahead"
        )
    if policy != "static" and sum(rounded.values()) <= limit:
        return _apart(rounded)
    best = _search(visits, cycle, rounded, limit, base, policy, made)
    if policy == "belady" and len(rounded) <= _FEW:
        offsets = Refiner(visits, cycle, rounded, limit, made).run(best.offsets)
        best = Arrangement(offsets, _extent(offsets, rounded))
    return best


def least(
    visits: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    ahead: int = 1,
    returned: int = 1,
    align: int = 4096,
) -> int:
    """The smallest capacity that `arrange` takes."""
    _check(ahead, returned, "static")
    cycle = windows(visits, ahead, returned)
    rounded = _rounded(cycle, sizes, align)
    return _static(cycle, rounded).extent if rounded else 0


def traffic(
    visits: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    offsets: Mapping[Item, int],
    made: Collection[Item] = (),
) -> Traffic:
    """What one cycle fetches at these addresses, found by playing two cycles. made: as for
    `arrange`; their first visit fetches nothing."""
    items = sorted({item for visit in visits for item in visit}, key=str)
    _known(items, offsets, "offset")
    _known(items, sizes, "size")
    edges = np.unique([e for i in items for e in (offsets[i], offsets[i] + sizes[i])])
    first = np.searchsorted(edges, [offsets[i] for i in items])
    last = np.searchsorted(edges, [offsets[i] + sizes[i] for i in items])
    place = {
        i: (n, slice(a, b)) for n, (i, a, b) in enumerate(zip(items, first, last, strict=True))
    }
    owner = np.full(len(edges), -1)
    fetched = fetches = 0
    for played in range(2):
        fresh = set(made)
        for item in chain.from_iterable(visits):
            number, where = place[item]
            if (owner[where] != number).any():
                owner[where] = number
                if played and item not in fresh:
                    fetched += sizes[item]
                    fetches += 1
            fresh.discard(item)
    return Traffic(fetched, fetches)


def _check(ahead: int, returned: int, policy: str) -> None:
    if ahead < 0:
        raise OutsizeError(f"ahead is {ahead}; expected 0 visits or more")
    if not 1 <= returned <= ahead + 1:
        raise OutsizeError(
            f"returned is {returned}; expected 1 to {ahead + 1}, the visits held at once"
        )
    if policy not in ("belady", "lru", "static"):
        raise OutsizeError(f"policy is {policy!r}; expected belady, lru or static")


def _rounded(
    cycle: Sequence[Collection[Item]], sizes: Mapping[Item, int], align: int
) -> dict[Item, int]:
    items = dict.fromkeys(item for window in cycle for item in window)
    _known(items, sizes, "size")
    return {item: -(-sizes[item] // align) * align for item in items}


def _known(items: Collection[Item], said: Mapping[Item, int], what: str) -> None:
    """OutsizeError for an item that is visited and of which something is not said."""
    for item in items:
        if item not in said:
            raise OutsizeError(
                f"pool: {item} is visited and has no {what}; expected one for each of the"
                f" {counted(len(items), 'item')}: this is a bug, please report the plan"
            )


def _search(
    visits: Sequence[Collection[Item]],
    cycle: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    limit: int,
    base: Arrangement,
    policy: Policy,
    made: Collection[Item],
) -> Arrangement:
    """The layout with the least traffic of those tried. With many items it need only come near to
    what the policy promises, which is the traffic where nothing is given up for lack of a place."""
    best, cost = base, traffic(visits, sizes, base.offsets, made).fetched
    demand = sum(sizes[gap.item] for gap in gaps(cycle, made))
    many = len(sizes) > _MANY
    for keep in _choices(cycle, sizes, limit, policy, made):
        near = (demand - sum(sizes[gap.item] for gap in keep)) * _NEAR if many else 0
        if cost <= near:
            continue
        for found in _layouts(cycle, sizes, keep, limit):
            fetched = traffic(visits, sizes, found.offsets, made).fetched
            if fetched < cost:
                best, cost = found, fetched
            if cost <= near:
                break
    return best


def _choices(
    cycle: Sequence[Collection[Item]],
    sizes: Mapping[Item, int],
    limit: int,
    policy: Policy,
    made: Collection[Item],
) -> Iterator[list[Gap]]:
    """What to keep. Belady tries what LRU would keep as well, so as to be no worse."""
    if policy == "static":
        return
    for share in _LOGICAL if len(sizes) <= _MANY else (1.0,):
        logical = int(limit * share)
        if policy == "belady":
            yield kept(cycle, sizes, logical, "belady", made)
            yield shortest(cycle, sizes, logical, made)
        yield kept(cycle, sizes, logical, "lru", made)


def _static(cycle: Sequence[Collection[Item]], sizes: Mapping[Item, int]) -> Arrangement:
    """The tightest layout found when nothing is kept beyond its windows."""
    whole = sum(sizes.values())
    best = min(_layouts(cycle, sizes, [], whole), key=lambda found: found.extent)
    fullest = max((sum(sizes[item] for item in window) for window in cycle), default=0)
    if best.extent > fullest and len(sizes) <= _MANY:
        # Around a cycle whose length the rooms do not divide, taking every n-th item first may
        # need a room less than taking them as they come.
        board = Board(cycle, sizes, [], whole)
        rank = {item: i for i, item in enumerate(board.items)}
        for every in range(2, _STRIDES):
            order = sorted(sizes, key=lambda i: (-sizes[i], rank[i] % every, rank[i]))
            offsets = board.place(order) or {}
            if offsets and _extent(offsets, sizes) < best.extent:
                best = Arrangement(offsets, _extent(offsets, sizes))
    return best


def _apart(sizes: Mapping[Item, int]) -> Arrangement:
    """Every item in bytes of its own."""
    starts = accumulate(sizes.values(), initial=0)
    return Arrangement(dict(zip(sizes, starts, strict=False)), sum(sizes.values()))


def _layouts(
    cycle: Sequence[Collection[Item]], sizes: Mapping[Item, int], keep: Sequence[Gap], limit: int
) -> Iterator[Arrangement]:
    """Layouts by several orders of placing, leaving out those that need more than `limit`."""
    board = Board(cycle, sizes, keep, limit)
    span, first = board.spans, {item: i for i, item in enumerate(board.items)}
    orders = (
        lambda i: (-sizes[i], -span[i], first[i]),
        lambda i: (-span[i], -sizes[i], first[i]),
        lambda i: (-sizes[i], first[i]),
    )
    for key in orders:
        offsets = board.place(sorted(sizes, key=key))
        if offsets is not None:
            yield Arrangement(offsets, _extent(offsets, sizes))


def _extent(offsets: Mapping[Item, int], sizes: Mapping[Item, int]) -> int:
    return max((start + sizes[item] for item, start in offsets.items()), default=0)
