"""Plans on unlike devices: a pipeline whose stages weigh what each worker computes and holds, or
shares of a step's rows (outsize/foresight/planning/shares.py), whichever takes less.

Of a pipeline every stage lies within one kind of device, the tensor and data axes within a stage,
so that sums are among equals. How many blocks a stage has is exact: the least beat T for which
every stage takes as many blocks as it computes in T and holds, and these are all blocks. Which kind
comes first is tried both ways: the first stages hold the activations of more microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

from outsize.errors import OutsizeError
from outsize.foresight.conventions import COUNTS
from outsize.foresight.layout import Layout, Recompute
from outsize.foresight.memory import Memory, reserves, workers
from outsize.foresight.planning.asked import Asked
from outsize.foresight.planning.choose import reach, room_of
from outsize.foresight.planning.layouts import ROWS, STACK, STAGES, WIDE, divisors
from outsize.foresight.planning.shares import layouts, shared_rows
from outsize.foresight.planning.uneven import Part, Speeds, Uneven, level, speeds
from outsize.foresight.shape import Shape
from outsize.foresight.sources import Roofline
from outsize.hardware.cluster import Cluster, Group


def choose_unlike(shape: Shape, asked: Asked, cluster: Cluster, top: int = 5) -> list[Uneven]:
    """The fastest, no more than `top`. Raises OutsizeError where nothing has what is asked or fits,
    and for models and objectives that are planned for like devices alone."""
    if shape.experts:
        raise OutsizeError("unlike devices are planned for models without experts yet")
    if asked.objective != "time":
        raise OutsizeError(f"objective {asked.objective} of unlike devices; expected time")
    every = list(_layouts(shape, asked, cluster))
    wide = list(layouts(shape, asked, cluster))
    if not every and not wide:
        raise OutsizeError(
            f"no layout over these {len(cluster.groups)} kinds of devices has"
            f" {asked.conditions.said() or 'what is asked'}; expected axes that divide each kind"
        )
    found = [plan for layout in every for plan in _planned(shape, asked, cluster, layout)]
    found += shared_rows(shape, asked, cluster)
    if not found:
        raise OutsizeError(
            f"none of {len(every) + len(wide)} layouts over {cluster.count} unlike devices fits;"
            " expected more memory, or more devices"
        )
    return sorted(found, key=lambda plan: plan.seconds)[:top]


def _layouts(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[Layout]:
    """Meshes whose stages lie within one kind each."""
    among, allow = asked.conditions.among, asked.conditions.allow
    node = math.gcd(*(group.node for group in cluster.groups), shape.heads)
    stack = WIDE if asked.precision == "fp32" else STACK
    kinds: tuple[Recompute, ...] = ("none", "full")
    for t in among("tensor", divisors(node)):
        for d in divisors(math.gcd(*(group.count for group in cluster.groups))):
            wide = int(t) * d
            if any(group.count % wide for group in cluster.groups) or not allow("data", d):
                continue
            p = cluster.count // wide
            if not (allow("pipeline", p) and p <= min(shape.layers, STAGES)):
                continue
            for rows, zero, recompute in product(among("rows", ROWS), (0, 1), kinds):
                m, left = divmod(asked.batch, int(rows) * d)
                fits = m >= p and not left and allow("zero", zero) and (d > 1 or not zero)
                if fits and allow("recompute", recompute):
                    yield Layout(
                        cluster.count, int(rows), asked.batch, asked.sequence, stack, int(t), p,
                        recompute=recompute, precision=asked.precision, states=d if zero else 1,
                        attention=stack.attention, sequence_parallel=int(t) > 1,
                    )  # fmt: skip


def _planned(shape: Shape, asked: Asked, cluster: Cluster, lay: Layout) -> Iterator[Uneven]:
    """Of one layout, the best order of the kinds of devices."""
    wide, most = lay.tensor * lay.data, shape.layers - lay.pipeline + 1
    orders, held = [], dict[tuple[int, int], int]()
    for order in permutations(range(len(cluster.groups))):
        kinds = [kind for kind in order for _ in range(cluster.groups[kind].count // wide)]
        for place, kind in enumerate(kinds):
            if (kind, place) not in held:
                group = cluster.groups[kind]
                held[kind, place] = _holds(shape, asked, cluster, lay, (group, place), most)
        holds = [held[kind, place] for place, kind in enumerate(kinds)]
        if min(holds) >= 1 and sum(holds) >= shape.layers:
            orders.append((kinds, holds))
    if not orders:
        return
    kept = []
    for kind, group in enumerate(cluster.groups):
        largest = max(count for kinds, holds in orders
                      for one, count in zip(kinds, holds, strict=True) if one == kind)  # fmt: skip
        each = range(1, largest + 1)
        shapes = [(replace(shape, layers=n * lay.pipeline), lay) for n in each]
        kept.append(speeds(cluster, group, shapes))  # n blocks a stage, of such devices alone
    made = []
    for kinds, holds in orders:
        stages = [kept[kind] for kind in kinds]
        blocks = cut(shape.layers, stages, holds)
        made.append(_forecast(shape, asked, cluster, lay, stages, blocks))
    yield min(made, key=lambda plan: plan.seconds)


def cut(layers: int, stages: Sequence[Speeds], holds: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each stage so that the slowest takes least. holds: at most, all together enough."""
    last = len(stages) - 1
    takes = [kind.last if place == last else kind.middle for place, kind in enumerate(stages)]
    return level(layers, takes, holds)


def _holds(
    shape: Shape, asked: Asked, cluster: Cluster, lay: Layout, at: tuple[Group, int], most: int
) -> int:
    """Blocks that a device has room for at a place of the pipeline."""
    group, _ = at
    room = room_of(asked, replace(cluster, groups=(group,), rates=()))
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _held(shape, lay, at, middle).process <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _held(shape: Shape, lay: Layout, at: tuple[Group, int], blocks: int) -> Memory:
    group, place = at
    of = replace(shape, layers=blocks * lay.pipeline)
    return list(workers(of, lay, reserves(group.device)).values())[place]


def _forecast(
    shape: Shape, asked: Asked, cluster: Cluster, lay: Layout, stages: Sequence[Speeds],
    blocks: Sequence[int],
) -> Uneven:  # fmt: skip
    parts = []
    for place, (kind, count) in enumerate(zip(stages, blocks, strict=True)):
        alone = replace(cluster, groups=(kind.group,), rates=())
        one = (kind.last if place == lay.pipeline - 1 else kind.middle)[count - 1]
        held = _held(shape, lay, (kind.group, place), count)
        parts.append(
            Part(
                kind.group.device.name, count, float(one), held, room_of(asked, alone),
                lay.tensor * lay.data, lay.batch // lay.data,
            )
        )  # fmt: skip
    beats = [part.beat for part in parts]
    ends = [
        float(kind.sums[n - 1] + kind.update[n - 1]) for kind, n in zip(stages, blocks, strict=True)
    ]
    slowest = max(beats)
    spare = min(float(kind.spare[n - 1]) for kind, n in zip(stages, blocks, strict=True))
    total = lay.microbatches * slowest + sum(beats) - slowest - spare + max(ends)
    seconds = total * max(kind.spread for kind in stages)
    off = max(reach(part.device, lay.precision) for part in parts)
    peak = sum(Roofline(g.device).peak(lay.precision) * g.count for g in cluster.groups)
    work = COUNTS["causal"](shape, float(lay.batch * lay.sequence), lay.sequence, False)
    return Uneven(
        lay, tuple(parts), seconds, seconds / off, seconds * off, work / (seconds * peak),
        lay.microbatches,
    )  # fmt: skip
