"""Plans on unlike devices whose data axis goes over all kinds of them: each worker has a share of
a step's rows, by its speed.

Every worker has the whole model (or its part of the tensor axis, which lies within one kind) and as
many microbatches as the others; those of fast devices have more rows. Of so many microbatches the
shares are those of the least slowest worker (`level`). Gradients are sums over all rows, divided in
one place by the number of targets, so that no share changes a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from outsize.foresight.constants import Array
from outsize.foresight.conventions import COUNTS
from outsize.foresight.layout import Layout, Recompute
from outsize.foresight.memory import Memory, memory, reserves
from outsize.foresight.planning.asked import Asked
from outsize.foresight.planning.choose import reach, room_of
from outsize.foresight.planning.layouts import ROWS, STACK, WIDE, divisors
from outsize.foresight.planning.uneven import Part, Speeds, Uneven, level, speeds
from outsize.foresight.shape import Shape
from outsize.foresight.sources import Roofline
from outsize.hardware.cluster import Cluster, Group


@dataclass(frozen=True)
class _Kind:
    """Like workers: how many; seconds of microbatches of 1, 2, ... rows; bytes that each takes."""

    count: int
    room: int
    held: tuple[Memory, ...]
    speeds: Speeds

    def step(self, microbatches: int, most: int) -> Array:
        """Seconds of a step's microbatches, by its rows less `microbatches`, up to `most` rows."""
        beats = np.append(self.speeds.last, 0.0)
        rows = np.arange(microbatches, min(most, len(self.held) * microbatches) + 1)
        each, more = np.divmod(rows, microbatches)
        found: Array = more * beats[each] + (microbatches - more) * beats[each - 1]
        return np.maximum.accumulate(found)  # fewer rows never take longer


def shared_rows(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[Uneven]:
    """Of each layout and number of microbatches that is allowed and fits, the best shares."""
    for lay in layouts(shape, asked, cluster):
        counts = sorted(
            {max(1, asked.batch // lay.data // rows) for rows in range(1, max(ROWS) + 1)}
        )
        counts = [m for m in counts if asked.conditions.allow("microbatches", m)]
        for several in {m > 1 for m in counts}:
            kinds = [_kind(shape, asked, cluster, group, lay, several) for group in cluster.groups]
            if all(kind.held for kind in kinds):
                for m in (m for m in counts if (m > 1) == several):
                    yield from _planned(shape, asked, cluster, lay, kinds, m)


def layouts(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[Layout]:
    """Of one row a microbatch: the tensor axis within one kind, the data axis over all."""
    among, allow = asked.conditions.among, asked.conditions.allow
    node = math.gcd(*(group.node for group in cluster.groups), shape.heads)
    stack = WIDE if asked.precision == "fp32" else STACK
    again: tuple[Recompute, ...] = ("none", "full")
    for t, zero, recompute in product(among("tensor", divisors(node)), (0, 1), again):
        d = cluster.count // int(t)
        whole = not any(group.count % int(t) for group in cluster.groups) and asked.batch >= d
        said = allow("pipeline", 1) and allow("data", d) and allow("zero", zero)
        if whole and said and allow("recompute", recompute):
            yield Layout(
                cluster.count, 1, asked.batch, asked.sequence, stack, int(t), recompute=recompute,
                precision=asked.precision, states=d if zero else 1, attention=stack.attention,
                sequence_parallel=int(t) > 1,
            )  # fmt: skip


def _kind(
    shape: Shape, asked: Asked, cluster: Cluster, group: Group, lay: Layout, several: bool
) -> _Kind:
    """One kind of device. several: microbatches in a step."""
    room = room_of(asked, replace(cluster, groups=(group,), rates=()))
    most = max(int(rows) for rows in (*asked.conditions.among("rows", ROWS), 1))
    lays, held = [], list[Memory]()
    for rows in range(1, most + 1):
        one = replace(lay, rows=rows, batch=rows * lay.data * (2 if several else 1))
        bytes_ = memory(shape, one, reserves(group.device))
        if bytes_.process > room:
            break
        lays.append((shape, one))
        held.append(bytes_)
    made = speeds(cluster, _over_all(group, cluster), lays or [(shape, lay)])
    return _Kind(group.count // lay.tensor, room, tuple(held), made)


def _over_all(group: Group, cluster: Cluster) -> Group:
    """As many of such devices as there are of all kinds, over its own outermost level."""
    *inner, last = group.levels
    size = -(-cluster.count * last.size // group.count)
    return replace(group, levels=(*inner, replace(last, size=size, shape="switched", dims=())))


def _planned(
    shape: Shape, asked: Asked, cluster: Cluster, lay: Layout, kinds: Sequence[_Kind], m: int
) -> Iterator[Uneven]:
    """The best shares of so many microbatches."""
    each = [kind.step(m, asked.batch) for kind in kinds]
    takes = [found for kind, found in zip(kinds, each, strict=True) for _ in range(kind.count)]
    total = asked.batch - lay.data * (m - 1)
    if sum(map(len, takes)) < total:
        return
    shares = tuple(m - 1 + more for more in level(total, takes, [len(one) for one in takes]))
    rows = -(-max(shares) // m)
    if min(-(-max(shares) // rows), min(shares)) != m or not asked.conditions.allow("rows", rows):
        return  # a plan of such microbatches has fewer of them
    whole = replace(lay, rows=rows)
    yield _forecast(shape, cluster, whole, list(zip(kinds, each, strict=True)), shares, m)


def _forecast(
    shape: Shape, cluster: Cluster, lay: Layout, kinds: Sequence[tuple[_Kind, Array]],
    shares: tuple[int, ...], m: int,
) -> Uneven:  # fmt: skip
    parts, steps, ends, first = list[Part](), [], [], 0
    for kind, each in kinds:
        own, of = shares[first : first + kind.count], kind.speeds
        first, largest = first + kind.count, -(-max(own) // m) - 1
        steps.append(float(each[max(own) - m]))
        ends.append(float(of.sums[largest] + of.update[largest]))
        parts.append(
            Part(
                of.group.device.name, shape.layers, float(of.last[largest]), kind.held[largest],
                kind.room, kind.count * lay.tensor, max(own),
            )
        )  # fmt: skip
    seconds = (max(steps) + max(ends)) * max(kind.speeds.spread for kind, _ in kinds)
    off = max(reach(part.device, lay.precision) for part in parts)
    peak = sum(Roofline(g.device).peak(lay.precision) * g.count for g in cluster.groups)
    work = COUNTS["causal"](shape, float(lay.batch * lay.sequence), lay.sequence, False)
    alike = max(shares) == min(shares)
    return Uneven(
        lay, tuple(parts), seconds, seconds / off, seconds * off, work / (seconds * peak), m,
        () if alike else shares,
    )  # fmt: skip
