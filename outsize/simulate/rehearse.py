"""Rehearsal: one microbatch of a plan on fake tensors, to learn what each action costs.

The runtime itself plays the schedule, over tensors that have shapes but no memory, under the same
ledger that counts real ones. What comes out are the bytes each action leaves, the bytes it
needs while it runs, and its work; the whole step is then composed from these by replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.memory import Ledger
from outsize.plan import Plan
from outsize.runtime import Job
from outsize.schedule import Kind
from outsize.simulate.counter import Counter, Work


@dataclass(frozen=True)
class ActionCost:
    """allocates: bytes by kind that stay (negative: freed); workspace: bytes above what was live
    before, while it runs; work: what it computes."""

    allocates: Mapping[str, int]
    workspace: int
    work: Work


@dataclass(frozen=True)
class Costs:
    """static: bytes by kind that are always there, the step's whole batch ("data") among them where
    it lies on the device. actions: by (kind, stage) of one microbatch.
    segments: name and static bytes by kind of each segment of the model."""

    static: Mapping[str, int]
    actions: Mapping[tuple[Kind, int], ActionCost]
    segments: tuple[tuple[str, Mapping[str, int]], ...]


def rehearse(
    plan: Plan, job_of: Callable[[Plan, Ledger], Job], batch_of: Callable[[int], object]
) -> Costs:
    """Costs of a plan's actions.

    job_of makes the job inside a fake mode with the ledger given; batch_of(rows) a batch of rows,
    called for the whole step's: it is there throughout, though one microbatch of it is played.
    """
    rows = min(plan.microbatch_rows, plan.rows)
    small = replace(plan, rows=rows, microbatch_rows=rows, budget=None)
    ledger = Ledger()
    with FakeTensorMode():
        job = job_of(small, ledger)
        job.ready(batch_of(plan.rows), count=1.0)
        static = {kind: count for kind, count in ledger.live.items() if count}
        actions = _play(job, ledger)
        segments = _segments(job)
        job.close()
    return Costs(static, actions, segments)


def _play(job: Job, ledger: Ledger) -> dict[tuple[Kind, int], ActionCost]:
    costs: dict[tuple[Kind, int], ActionCost] = {}
    with ledger:
        for action in job.schedule.workers[0]:
            if action.kind is Kind.NORM:  # its bytes are nothing and its number does not exist
                continue
            before, total = dict(ledger.live), ledger.total
            counter = Counter()
            with counter:
                event = job.act(action, 0.0)
            delta = {k: ledger.live[k] - before[k] for k in before if ledger.live[k] != before[k]}
            costs[action.kind, action.stage] = ActionCost(delta, event.peak - total, counter.work)
    return costs


def _segments(job: Job) -> tuple[tuple[str, Mapping[str, int]], ...]:
    """Static bytes by kind of each segment, from its chunks' tables."""
    made: list[dict[str, int]] = [{} for _ in job.flow.segments]
    for chunk in job.chunks:
        held: dict[str, list[Tensor | None]] = {
            "parameters": [chunk.parameters],
            "gradients": [chunk.gradients],
            "master": [chunk.master],
            "optimizer": [*chunk.optimizer.values()],
        }
        for kind, flats in held.items():
            count = sum(flat.nbytes for flat in flats if flat is not None)
            if count:
                mine = made[chunk.table.segment]
                mine[kind] = mine.get(kind, 0) + count
    return tuple((name, kinds) for (name, _), kinds in zip(job.flow.segments, made, strict=True))
