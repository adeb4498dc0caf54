"""Forecasts of jobs that are played whole, on fake tensors: those whose steps a technique makes.

Every action of a step is played once under the ledger, which gives its bytes, and under a counter,
which gives its work; rates of the machine make seconds of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outsize.data import Batch
from outsize.hardware import Hardware
from outsize.memory import KINDS, Ledger
from outsize.plan import DEVICE, Plan
from outsize.runtime.engine import Engine, Loaded
from outsize.runtime.job import Job
from outsize.schedule import Action, Kind, Lane, Schedule
from outsize.schedule.layout import Placement
from outsize.schedule.residency import moved
from outsize.schedule.starting import Filling, starting
from outsize.simulate.counter import Counter, Work
from outsize.simulate.forecast import Forecast, duration, rate
from outsize.simulate.replay import kinds_at_peak, play
from outsize.torch_private import FakeTensorMode
from outsize.trace.trace import Trace

Named = tuple[tuple[str, Mapping[str, int]], ...]


@dataclass(frozen=True)
class Played:
    """A schedule with its actions' bytes, and as it was predicted."""

    schedule: Schedule
    trace: Trace
    flops: float


def predicted(
    plan: Plan,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    hardware: Hardware,
    filling: Filling,
) -> Forecast:
    """What a plan will hold and take. job_of, batch_of: called in a fake mode."""
    ledger = Ledger()
    with FakeTensorMode():
        job = job_of(plan, ledger)
        static = static_of(ledger)
        job.ready(batch_of(plan.rows), 1.0)

        def seconds(action: Action, work: Work) -> float:
            return seconds_of(job, hardware, action, work)

        made = played(job.engine, job.loaded, ledger, static, seconds)
        names = [name for name, _ in job.flow.segments]
        segments = segments_of(job.placement, names, made.schedule)
        batch, size = _evaluated(batch_of(plan.microbatch_size)), plan.microbatch_size
        with torch.no_grad():
            job.method.microbatches.ready(batch, [(0, size)], 1.0)
            evaluation = highest(job.engine, job.playable(job.placement.evaluation(1)), ledger)
    return forecast_of(plan, made, static, segments, job.placement, filling, evaluation)


def seconds_of(job: Job, hardware: Hardware, action: Action, work: Work) -> float:
    """What an action takes: of what moves its bytes, of what computes its work and what its method
    has beside that."""
    if action.lane is not Lane.COMPUTE:
        placement, fetch = job.placement, action.kind is Kind.FETCH
        return sum(
            span.bytes / rate(hardware, placement.chunks.tier(span.chunk, span.what), fetch)
            for span in placement.items.spans[moved(action)]
        )
    return duration(work, hardware.devices[0]) + job.method.seconds(action)


def highest(engine: Engine, program: Loaded, ledger: Ledger) -> int:
    """The peak of a list, in bytes."""
    with ledger:
        engine.begin(program)
        return max(engine.alone(step).peak for step in program.steps)


def _evaluated(batch: object) -> Batch:
    """A batch as evaluations have it: without dropout."""
    assert isinstance(batch, Batch), "groups are of native decoders"
    return replace(batch, noise=None)


def static_of(ledger: Ledger) -> dict[str, int]:
    return {kind: count for kind, count in ledger.live.items() if count}


def played(
    engine: Engine,
    program: Loaded,
    ledger: Ledger,
    static: Mapping[str, int],
    seconds: Callable[[Action, Work], float],
) -> Played:
    """The actions one after the other, then beside each other by the clock."""
    actions: list[Action] = []
    times: dict[object, float] = {}
    flops = 0.0
    with ledger:
        engine.begin(program)
        for step in program.steps:
            action = step.action
            times[action.key] = 0.0
            if action.kind is Kind.NORM:  # its bytes are nothing and its number does not exist
                actions.append(action)
                continue
            before, total, counter = dict(ledger.live), ledger.total, Counter()
            with counter:
                event = engine.alone(step)
            delta = ((k, ledger.live[k] - n) for k, n in before.items() if ledger.live[k] != n)
            workspace = max(0, event.peak - total)
            allocates = tuple((f"device/{kind}", count) for kind, count in delta)
            actions.append(replace(action, allocates=allocates, workspace=workspace))
            times[action.key] = seconds(action, counter.work)
            flops += counter.work.flops()
    filled = replace(program.schedule, workers=(tuple(actions),))
    return Played(filled, play(filled, static, lambda _, a: times[a.key]), flops)


def segments_of(placement: Placement, names: Sequence[str], schedule: Schedule) -> Named:
    """By segment its static bytes, what a microbatch keeps of it and its costliest workspace."""
    made: list[dict[str, int]] = [{} for _ in names]
    for kind, segment, size in _resting(placement, below=False):
        made[segment][kind] = made[segment].get(kind, 0) + size
    for action in schedule.workers[0]:
        if action.lane is not Lane.COMPUTE or action.kind is Kind.NORM:
            continue
        here = made[placement.plan.stages[action.stage].first]
        kept = dict(action.allocates).get("device/activations", 0)
        if action.kind.way == "forward" and action.microbatch == 0 and kept > 0:
            here["activations"] = here.get("activations", 0) + kept
        here["workspace"] = max(here.get("workspace", 0), action.workspace)
    return tuple(pair for pair in zip(names, made, strict=True) if any(pair[1].values()))


def _resting(placement: Placement, below: bool) -> Iterator[tuple[str, int, int]]:
    """(kind, or below the device the tier; segment; bytes) of the states of chunks."""
    for index, table in enumerate(placement.chunks.tables):
        for what, dtype in placement.chunks.held(index):
            tier = placement.chunks.tier(index, what)
            if below == (tier != DEVICE):
                kind = what if what in KINDS else "optimizer"
                size = placement.chunks.numel(index, what) * dtype.itemsize
                yield tier if below else kind, table.segment, size


def forecast_of(
    plan: Plan,
    made: Played,
    static: Mapping[str, int],
    segments: Named,
    placement: Placement,
    filling: Filling,
    evaluation: int,
) -> Forecast:
    """evaluation: the peak of one microbatch's."""
    beside = starting(placement, filling)
    begun = {**{k: n for k, n in static.items() if k != "data"}, "workspace": beside}
    below: dict[str, int] = {}
    for tier, _, size in _resting(placement, below=True):
        below[tier] = below.get(tier, 0) + size
    count = sum(table.numel for table in placement.chunks.tables)
    trace = made.trace
    peak, kinds = trace.peak(), kinds_at_peak(trace, static)
    if sum(begun.values()) > peak:
        peak, kinds = sum(begun.values()), begun
    return Forecast(
        plan, made.schedule, static, segments, max(peak, evaluation), kinds,
        trace.span(), made.flops, trace, below, count, evaluation=evaluation,
    )  # fmt: skip
