"""Forecasts of jobs that are played whole, on fake tensors: those whose steps a technique makes.

Every action of a step is played once under the ledger, which gives its bytes, and under a counter,
which gives its work; rates of the machine make seconds of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from outsize.data import Batch
from outsize.hardware import Hardware
from outsize.memory import Ledger
from outsize.plan import Plan
from outsize.runtime.engine import Engine, Loaded
from outsize.runtime.job import Job
from outsize.schedule import Action, Kind, Lane, Schedule
from outsize.schedule.residency import moved
from outsize.schedule.starting import Filling, starting
from outsize.simulate.costs import ActionCost
from outsize.simulate.forecast import Forecast, copying, duration, rate
from outsize.simulate.rehearse import cost_of
from outsize.simulate.replay import filled, kinds_at_peak, play
from outsize.simulate.state_bytes import below, held_of
from outsize.torch_private import FakeTensorMode

Named = tuple[tuple[str, Mapping[str, int]], ...]


def predicted(
    plan: Plan,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    hardware: Hardware,
    filling: Filling,
    ledger: Ledger,
) -> Forecast:
    """What a plan will hold and take. job_of, batch_of: called in a fake mode; ledger: counts what
    they make."""
    with FakeTensorMode():
        job = job_of(plan, ledger)
        static = {kind: count for kind, count in ledger.live.items() if count}
        job.ready(batch_of(plan.rows), 1.0)
        costs = _costs(job.engine, job.loaded, ledger)
        batch, size = batch_of(plan.microbatch_size), plan.microbatch_size
        assert isinstance(batch, Batch), "groups are of native decoders"
        with torch.no_grad():
            job.method.microbatches.ready(replace(batch, noise=None), [(0, size)], 1.0)
            evaluation = highest(job.engine, job.playable(job.placement.evaluation(1)), ledger)
    placement, steps = job.placement, job.loaded.steps
    actions = tuple(filled(step.action, cost) for step, cost in zip(steps, costs, strict=True))
    seconds = [seconds_of(job, hardware, *both) for both in zip(actions, costs, strict=True)]
    schedule = replace(job.loaded.schedule, workers=(actions,))
    trace = play(schedule, static, lambda index, _: seconds[index])
    peak, kinds = trace.peak(), kinds_at_peak(trace, static)
    begun = {**{k: n for k, n in static.items() if k != "data"}, "workspace": 0}
    begun["workspace"] = starting(placement, filling)
    if sum(begun.values()) > peak:
        peak, kinds = sum(begun.values()), begun
    return Forecast(
        plan, schedule, static, segments_of(job, schedule, ledger.grain), max(peak, evaluation),
        kinds, trace.span(), sum(cost.work.flops() for cost in costs if cost), trace,
        below(placement, {}), sum(table.numel for table in placement.chunks.tables),
        evaluation=evaluation,
    )  # fmt: skip


def _costs(engine: Engine, program: Loaded, ledger: Ledger) -> list[ActionCost | None]:
    """What the actions cost, one after the other. None: no bytes, and a number that does not
    exist."""
    with ledger:
        engine.begin(program)
        return [
            None if step.action.kind is Kind.NORM else cost_of(engine, step, ledger)
            for step in program.steps
        ]


def seconds_of(job: Job, hardware: Hardware, action: Action, cost: ActionCost | None) -> float:
    """What an action takes: of what moves its bytes, of what computes its work and what its method
    has beside that."""
    if cost is None:
        return 0.0
    if action.kind is Kind.COPY:
        return copying(action, hardware)
    if action.lane is not Lane.COMPUTE:
        placement, fetch = job.placement, action.kind is Kind.FETCH
        return sum(
            span.bytes / rate(hardware, placement.chunks.tier(span.chunk, span.what), fetch)
            for span in placement.items.spans[moved(action)]
        )
    return duration(cost.work, hardware.devices[0]) + job.method.seconds(action)


def highest(engine: Engine, program: Loaded, ledger: Ledger) -> int:
    """The peak of a list, in bytes."""
    with ledger:
        engine.begin(program)
        return max(engine.alone(step).peak for step in program.steps)


def segments_of(job: Job, schedule: Schedule, grain: int = 1) -> Named:
    """By segment its static bytes, what a microbatch keeps of it and its costliest workspace."""
    made = held_of(job.placement, grain)
    for action in schedule.workers[0]:
        if action.lane is not Lane.COMPUTE or action.kind is Kind.NORM:
            continue
        here = made[job.plan.stages[action.stage].first]
        kept = dict(action.allocates).get("device/activations", 0)
        if action.kind.way == "forward" and action.microbatch == 0 and kept > 0:
            here["activations"] = here.get("activations", 0) + kept
        here["workspace"] = max(here.get("workspace", 0), action.workspace)
    names = [name for name, _ in job.flow.segments]
    return tuple(pair for pair in zip(names, made, strict=True) if any(pair[1].values()))
