"""What was measured of workers that talk, as forecasts ask for it: the link that explains a table,
seconds of a collective between the sizes of a table, and how much is hidden beside computing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from outsize.hardware.hardware import Link, Rate, Slowed, Talked

# Passes over the bytes of a tensor on its way: a sum for all is a scatter and a gather.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
LEAST_HIDDEN, MOST_HIDDEN = 1.0, 8.0


def link_of(
    table: Sequence[Talked], name: str, between: Literal["devices", "nodes"], joins: int = 0
) -> Link:
    """The link over which the largest messages of the table's largest group go so fast, and the
    smallest begin so late: bandwidth of one worker, seconds of one hop."""
    most = max(entry.workers for entry in table)
    mine = [entry for entry in table if entry.workers == most and entry.operation in PASSES]
    sizes = [entry.bytes for entry in mine]
    large = [entry for entry in mine if entry.bytes == max(sizes)]
    small = [entry for entry in mine if entry.bytes == min(sizes)]

    def rate(entry: Talked) -> float:
        moved = PASSES[entry.operation] * entry.bytes * (most - 1) / most
        return moved / entry.seconds.value

    def wait(entry: Talked) -> float:
        return entry.seconds.value / (PASSES[entry.operation] * (most - 1))

    fast, soon = max(large, key=rate), min(small, key=wait)
    return Link(
        name,
        between,
        Rate(rate(fast), "B/s", "probe", fast.seconds.date, note=_said(fast)),
        Rate(wait(soon), "s", "probe", soon.seconds.date, note=_said(soon)),
        joins,
    )


def seconds(
    table: Sequence[Talked], operation: str, bytes_: float, workers: int, inside: int
) -> float | None:
    """Of a collective as it was measured, between sizes in a straight line, above the largest as
    its bytes, below the least as that; None where such a group was not measured."""
    mine = sorted(
        (entry.bytes, entry.seconds.value)
        for entry in table
        if (entry.operation, entry.workers, entry.inside) == (operation, workers, inside)
    )
    if not mine:
        return None
    (least, quickest), (largest, longest) = mine[0], mine[-1]
    if bytes_ <= least:
        return quickest
    if bytes_ >= largest:
        return longest * bytes_ / largest
    for (low, before), (high, after) in pairwise(mine):
        if bytes_ <= high:
            return before + (after - before) * (bytes_ - low) / (high - low)
    raise AssertionError("sizes are in order")


def slowed(alone: tuple[float, float], beside: tuple[float, float], date: str) -> Slowed:
    """From seconds of computing and of talking, each alone and both begun at once. What ends first
    was beside the other all the time; the other was as fast as alone from then on."""
    first = 0 if beside[0] <= beside[1] else 1
    factors = [1.0, 1.0]
    factors[first] = beside[first] / alone[first]
    other = 1 - first
    done = alone[other] - (beside[other] - beside[first])  # of it, until the first had ended
    factors[other] = beside[first] / done if done > 0 else beside[other] / alone[other]
    return Slowed(max(1.0, factors[0]), max(1.0, factors[1]), date)


def norm(found: Slowed) -> float:
    """The p of a p-norm that gives what two equal loads take beside each other: 1 where one waits
    for the other, large where each goes on as if it were alone."""
    low, high = sorted((found.computing, found.talking))
    ratio = low + 1 - low / high  # of both to one: from then on what is left goes alone
    if ratio <= 2 ** (1 / MOST_HIDDEN):
        return MOST_HIDDEN
    return max(LEAST_HIDDEN, math.log(2) / math.log(ratio))


def _said(entry: Talked) -> str:
    return f"{entry.operation} of {entry.bytes} B, {entry.workers} workers"
