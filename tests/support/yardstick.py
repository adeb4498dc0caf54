"""What no layout of a pool can be better than, or not by much."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from outsize.memory.residency import _WARM, Item, _belady, _lru, needs

_ACCESSES = 200_000  # at most: it averages over as many cycles as this allows
Cycle = Sequence[Collection[Item]]


def bound(
    visits: Cycle,
    sizes: Mapping[Item, int],
    capacity: int,
    policy: Literal["belady", "lru"] = "belady",
    made: Collection[Item] = (),
) -> int:
    """Bytes fetched in one cycle where any item may lie anywhere at any time, on average over many
    cycles; nothing is fetched ahead, and what is made anew is not fetched at its first visit.

    A yardstick: the least there is where sizes are equal; where they differ, what throwing out
    the farthest gives, which can be missed by a little to either side.
    """
    play = _lru if policy == "lru" else _belady
    accesses = max(1, sum(len(visit) for visit in visits))
    rounds = max(2, min(2 * len(visits), _ACCESSES // accesses))
    first = {item: at[0] for item, at in needs(visits).items() if item in made}
    fetched = [
        sum(sizes[item] for item in new if first.get(item) != now % len(visits))
        for now, new in enumerate(play(visits, sizes, capacity, made, _WARM + rounds))
    ]
    return sum(fetched[_WARM * len(visits) :]) // rounds
