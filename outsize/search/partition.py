"""Partition: where a pipeline's stages begin, so that its slowest worker has least to do.

The model's fine stages (prologue, blocks, epilogue) stay in order and are cut into the stages of a
placement. A worker's load is the time of everything that it plays in a step, whichever stages of
the route these are, so looped, folded and two-way placements are balanced by worker and not by
stage. Like the partition by measured costs and memory of Karakus et al., "Amazon SageMaker Model
Parallelism", 2021, which shares devices out over a tree of modules from the root down; a chain can
be cut exactly (outsize/search/branch_and_bound.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.errors import OutsizeError, counted
from outsize.schedule.action import Kind
from outsize.schedule.pipelines import Pipeline
from outsize.schedule.place import Placement
from outsize.search.branch_and_bound import (
    Cost,
    Counts,
    Held,
    Search,
    Task,
    plays_of,
    smallest,
    within,
)

LIMIT = 100_000  # tries of a cut; about a second
_SLOWER = 5  # times as long a try takes where bytes are counted too

Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """cuts: the fine stages at which the second and further stages begin. seconds: of a step on
    the worker with most to do. least: no partition is quicker than this; equal to seconds where
    the search came to its end. bytes: of each worker."""

    cuts: Cuts
    seconds: float
    least: float
    bytes: tuple[int, ...]


def partition(
    costs: Sequence[Cost], placement: Placement, memory: int | None = None, held: Held = ()
) -> Cuts:
    """The cuts of the best partition: `Pipelined.cuts`. See `best`."""
    return best(costs, placement, memory, held).cuts


def best(
    costs: Sequence[Cost],
    placement: Placement,
    memory: int | None = None,
    held: Held = (),
    limit: int = LIMIT,
) -> Partition:
    """The partition whose slowest worker is the quickest, of those that fit.

    memory: bytes that each worker may hold. held: what `in_flight` gives for the schedule; (): all
    of a worker's microbatches at once. limit: tries of a cut until the best so far is given.
    Raises OutsizeError with the condition that does not hold and the nearest that does.
    """
    if len(costs) < placement.stages:
        raise OutsizeError(
            f"partition: {placement.stages} stages for {counted(len(costs), 'fine stage')}: a"
            " stage without"
            f" blocks cannot run; expected at most {counted(len(costs), 'stage')}, which is the"
            " nearest"
        )
    task = Task(tuple(costs), placement, held or everything(placement))
    ends, least = Search(task, limit).quickest(_even(len(costs), placement.stages))
    if memory is not None and task.most(ends) > memory:
        ends = smallest(task, (ends, _even(len(costs), placement.stages)), limit // _SLOWER)
        if task.most(ends) > memory:
            raise _too_small(task.most(ends), memory, ends[:-1])
        search = Search(task, limit // _SLOWER, within(task, memory))
        ends, fitting = search.quickest(ends)
        least = max(least, fitting)
    return Partition(ends[:-1], max(task.loads(ends)), least, task.bytes(ends))


def tightest(costs: Sequence[Cost], placement: Placement, held: Held) -> Cuts:
    """The cuts whose worker with most bytes has fewest, as far as the tries go."""
    task = Task(tuple(costs), placement, held)
    return smallest(task, (_even(len(costs), placement.stages),), LIMIT // _SLOWER)[:-1]


def in_flight(pipeline: Pipeline) -> Held:
    """What is alive together on each worker, from the order of its list: a microbatch of a stage
    from its FORWARD to its BACKWARD, or BACKWARD_WEIGHT where the two gradients are apart."""
    workers = []
    for actions in pipeline.schedule.workers:
        now, seen = [0] * pipeline.placement.stages, set[Counts]()
        for action in actions:
            if action.kind is Kind.FORWARD:
                now[action.stage] += 1
                seen.add(tuple(now))
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                now[action.stage] -= 1
        workers.append(_highest(seen))
    return tuple(workers)


def everything(placement: Placement) -> Held:
    """All microbatches of a worker at once, which is what GPipe holds."""
    return tuple((counts,) for counts in plays_of(placement))


def _highest(seen: set[Counts]) -> tuple[Counts, ...]:
    """Those that no other is at least as high as in every stage."""
    kept: list[Counts] = []
    for counts in sorted(seen, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(counts, other, strict=True)) for other in kept):
            kept.append(counts)
    return tuple(kept)


def _even(count: int, stages: int) -> tuple[int, ...]:
    """The ends with as many fine stages in each stage as can be."""
    return tuple(count * (s + 1) // stages for s in range(stages))


def _too_small(least: int, memory: int, cuts: Cuts) -> OutsizeError:
    """With the least bytes that a partition needs."""
    return OutsizeError(
        f"partition: memory of {memory} bytes a worker is too small:"
        f" {counted(least - memory, 'byte')} missing"
        f" at best, with cuts {list(cuts)}; the nearest that holds is {least}"
    )
