"""Walks: the segments that rows go through, where a plan's microbatches leave some of them out.

Which these are is the schedule's to say (SkipPipe, outsize/schedule/pipelines/skip_pipe.py). Read
here, so that the plain run goes the same ways in a simple loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.plan import Plan
from outsize.plan.approximate import PARTIAL
from outsize.schedule.pipelined import pipelining_of


@dataclass(frozen=True)
class Walk:
    """Rows [start, stop) of a step; segments: theirs, in order."""

    start: int
    stop: int
    segments: tuple[int, ...]


def walks_of(plan: Plan) -> tuple[Walk, ...]:
    """Of all rows of a step; none where all of them go through every segment."""
    if PARTIAL not in plan.approximate:
        return ()
    stages = plan.stages
    paths = pipelining_of(plan, 0, [(stage,) for stage in range(len(stages))]).paths
    found = []
    for place in range(plan.mesh.rows):
        first, _ = plan.rows_at(place)
        for microbatch, path in enumerate(paths):
            start, stop = plan.rows_of(microbatch, place)
            segments = (i for s in path for i in range(stages[s].first, stages[s].last))
            found.append(Walk(first + start, first + stop, tuple(segments)))
    return tuple(found)
