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

import numpy as np

from outsize.errors import OutsizeError
from outsize.memory.board import Board
from outsize.memory.residency import (
    Gap,
    Item,
    Policy,
    bound,
    kept,
    shortest,
    windows,
)
from outsize.memory.sizes import format_bytes

__all__ = ["Arrangement", "Item", "Policy", "Traffic", "arrange", "bound", "least", "traffic"]

_LOGICAL = (1.0, 0.95, 0.9, 0.8)  # of the capacity, for the policy: the rest is slack for placing
_MANY = 600  # items above which fewer layouts are tried


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
) -> Arrangement:
    """Addresses for the items of a cyclic list of visits in a pool of `capacity` bytes.

    ahead: visits that are fetched before their turn; returned: visits whose items are given back
    at a time. Items of one such window never share bytes. OutsizeError: capacity below `least`.
    """
    _check(ahead, returned, policy)
    cycle = windows(visits, ahead, returned)
    rounded = _rounded(cycle, sizes, align)
    base = _static(cycle, rounded)
    limit = capacity // align * align
    if base.extent > limit:
        raise OutsizeError(
            f"pool of {format_bytes(capacity)} is {base.extent - capacity:,} bytes short of"
            f" {base.extent:,} bytes, the least that holds {ahead + 1} visits at once;"
            " give more memory or fetch fewer visits ahead"
        )
    best, cost = base, traffic(visits, sizes, base.offsets).fetched
    floor = _compulsory(visits, sizes, limit)
    for found in _candidates(cycle, rounded, limit, policy):
        fetched = traffic(visits, sizes, found.offsets).fetched
        if fetched < cost:
            best, cost = found, fetched
        if cost <= floor:
            break
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
    return _static(cycle, _rounded(cycle, sizes, align)).extent


def traffic(
    visits: Sequence[Collection[Item]], sizes: Mapping[Item, int], offsets: Mapping[Item, int]
) -> Traffic:
    """What one cycle fetches at these addresses, found by playing two cycles."""
    items = sorted({item for visit in visits for item in visit})
    edges = np.unique([e for i in items for e in (offsets[i], offsets[i] + sizes[i])])
    first = np.searchsorted(edges, [offsets[i] for i in items])
    last = np.searchsorted(edges, [offsets[i] + sizes[i] for i in items])
    place = {
        i: (n, slice(a, b)) for n, (i, a, b) in enumerate(zip(items, first, last, strict=True))
    }
    owner = np.full(len(edges), -1)
    fetched = fetches = 0
    for played in range(2):
        for visit in visits:
            for item in visit:
                number, where = place[item]
                if (owner[where] != number).any():
                    owner[where] = number
                    fetched += played * sizes[item]
                    fetches += played
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
    return {item: -(-sizes[item] // align) * align for window in cycle for item in window}


def _compulsory(visits: Sequence[Collection[Item]], sizes: Mapping[Item, int], limit: int) -> int:
    """Bytes that no layout can save: what is not pinned is fetched once at least."""
    return max(0, sum(sizes[i] for i in {item for visit in visits for item in visit}) - limit)


def _candidates(
    cycle: Sequence[Collection[Item]], sizes: Mapping[Item, int], limit: int, policy: Policy
) -> Iterator[Arrangement]:
    """Layouts to choose from. Belady tries what LRU would keep as well, so it is never worse."""
    if policy == "static":
        return
    many = len(sizes) > _MANY
    for share in _LOGICAL[: 1 if many else None]:
        logical = int(limit * share)
        choices = [kept(cycle, sizes, logical, policy)]
        if policy == "belady":
            choices.append(shortest(cycle, sizes, logical))
            choices.append(kept(cycle, sizes, logical, "lru"))
        for keep in choices:
            yield from _layouts(cycle, sizes, keep, limit)


def _static(cycle: Sequence[Collection[Item]], sizes: Mapping[Item, int]) -> Arrangement:
    """The tightest layout found when nothing is kept beyond its windows."""
    whole = sum(sizes.values())
    return min(_layouts(cycle, sizes, [], whole), key=lambda found: found.extent)


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
            yield Arrangement(offsets, max((offsets[i] + sizes[i] for i in offsets), default=0))
