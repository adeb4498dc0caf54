"""SkipPipe: partial pipelines, in which every microbatch skips some of the stages.

Blagoev et al., "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in
Heterogeneous Networks", 2025. It changes what is computed: a microbatch trains only the stages that
it visits. All visit the first stage, and each other one is skipped about equally often. Paths
that follow each other closely should not meet on a worker, so the schedule is the shortest of
several ways to hand the paths out: a new one for each microbatch, or for whole runs of them, as
they are or with neighbouring stages in each other's place.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.errors import OutsizeError
from outsize.schedule.pipelines.conditions import at_least, basic
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.greedy import best_greedy, makespan
from outsize.schedule.pipelines.pipeline import Paths, Pipeline, pipeline
from outsize.schedule.place import looped, one_way


def skip_pipe(
    devices: int, microbatches: int, skip: float = 0.25, costs: Costs = EQUAL
) -> Pipeline:
    """One stage a worker. skip: the part of the stages that each microbatch leaves out."""
    basic("SkipPipe", devices, microbatches)
    at_least("SkipPipe", "devices", devices, 3)
    at_least("SkipPipe", "microbatches", microbatches, devices)
    if not 0 <= skip <= 0.5:
        nearest = min(max(skip, 0.0), 0.5)
        raise OutsizeError(f"SkipPipe: skip is {skip}; expected 0 to 0.5; the nearest is {nearest}")
    left_out = int(skip * devices)
    place = one_way(devices, looped(devices, 1), microbatches)
    tries = [
        (paths, best_greedy(place, costs, devices, paths))
        for paths in _handed_out(devices, microbatches, left_out)
    ]
    paths, orders = min(tries, key=lambda t: makespan(place, t[1], costs.whole(), t[0]))
    swapped = any(path != tuple(sorted(path)) for path in paths)
    changed = f"each microbatch skips {left_out} of {devices} stages"
    changed += ", and some visit stages in another order" if swapped else ""
    return pipeline("SkipPipe", place, orders, paths=paths, approximate=changed)


def _handed_out(devices: int, microbatches: int, left_out: int) -> Iterator[Paths]:
    """Ways to give each microbatch a path: turns of the skipped stages, in runs of all lengths."""
    others = devices - 1
    for run in sorted({1, microbatches // others}):
        for swaps in (False, True):
            paths = []
            for m in range(microbatches):
                turn = m // run * left_out
                gone = {1 + (turn + i) % others for i in range(left_out)}
                path = [s for s in range(devices) if s not in gone]
                if swaps and left_out:
                    _swap(path, m // run % 2)
                paths.append(tuple(path))
            yield tuple(paths)


def _swap(path: list[int], odd: int) -> None:
    """Exchange neighbours behind the first stage, on every second path."""
    for at in range(1, len(path) - 1, 2) if odd else ():
        path[at], path[at + 1] = path[at + 1], path[at]
