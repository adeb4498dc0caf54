"""Calibration: the times of a plan's actions, measured on one block of each sort.

Rates of a machine predict a step that cannot be run; where a block can be, it is better asked. A
model with one layer of each sort that the plan has, and the whole prologue and epilogue, makes a
few steps of one microbatch each, within the plan's budget and from its tiers; what its actions
compute stands for all their like. What moves between tiers takes what their rates say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from statistics import median

from outsize import accelerator
from outsize.data import Batch
from outsize.memory.allocator import meter
from outsize.memory.ledger import OverBudget
from outsize.memory.store import Store
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.plan import DEVICE, Plan
from outsize.runtime import Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Action, Kind, Lane
from outsize.schedule.action import WHOLE
from outsize.simulate.forecast import Forecast
from outsize.simulate.replay import play
from outsize.simulate.sample import Sample, sample
from outsize.simulate.state_bytes import below

WARM, COUNTED = 1, 3  # steps; the first of a process pays for page faults and kernel set-up
StoresOf = Callable[[Plan, Mapping[str, int]], AbstractContextManager[Mapping[str, Store]]]
Times = Mapping[tuple[str, int], float]  # seconds by kind of action and segment of the sample


def calibrate(
    made: Forecast,
    config: DecoderConfig,
    recipe: Recipe,
    batch_of: Callable[[int], Batch],
    stores_of: StoresOf,
    device: str = "cpu",
) -> Forecast:
    """The forecast with times measured on this machine instead of computed from rates; as it is
    where one block of each sort does not fit the budget.

    batch_of(rows): real rows, for their documents decide what attention costs. stores_of: the tiers
    below of a plan that rests so many bytes on them. Holds one block of each sort, the prologue and
    the epilogue with their states while it runs.
    """
    chosen = _sample(made, config)
    resting = below(made.placements[0], {}, {chosen.stands.index(i) for i in set(chosen.stands)})
    try:
        with stores_of(chosen.plan, resting) as stores:
            model = build(chosen.config, seed=0, device=device)
            where, budget = accelerator.named(device), made.plan.budget
            kept = accelerator.reserved(where)
            ledger = None if budget is None else meter(where, budget, reserved=kept)
            here = Here(ledger=ledger, stores=stores)
            with closing(make_job(NativeModel(model), chosen.plan, recipe, here)) as job:
                times = _measure(job, batch_of(chosen.plan.rows))
    except OverBudget:
        return made
    share = made.parameters / sum(chunk.table.numel for chunk in job.chunks)
    known = {(e.lane, e.kind, e.stage, e.part): e.end - e.start for e in made.trace.events}

    def seconds(_: int, action: Action) -> float:
        if action.lane not in (Lane.COMPUTE, Lane.HOST):
            return known[action.lane.value, action.label, action.stage, action.part]
        if action.kind is Kind.NORM:
            return times[action.kind, WHOLE] * share
        stage = made.plan.stages[action.stage]
        whole = sum(times[action.kind, chosen.stands[i]] for i in range(stage.first, stage.last))
        if action.part == WHOLE:
            return whole
        return whole / len(made.placements[0].items.pieces[action.stage])

    trace = play(made.schedule, made.static, seconds)
    return replace(made, trace=trace, seconds=trace.span())


def _sample(made: Forecast, config: DecoderConfig) -> Sample:
    """One layer of each sort, whose states rest where those of the first of its sort do."""
    chosen = sample(config, replace(made.plan, rows=made.plan.microbatch_rows, row_shares=()))
    rest = {i: stage.rest for stage in made.plan.stages for i in range(stage.first, stage.last)}
    first = (rest[chosen.stands.index(place)] for place in range(len(chosen.plan.stages)))
    stages = (
        replace(stage, rest=replace(one, activations=DEVICE))
        for stage, one in zip(chosen.plan.stages, first, strict=True)
    )
    stream = replace(chosen.plan.stream, pool=0)
    return replace(chosen, plan=replace(chosen.plan, stages=tuple(stages), stream=stream))


def _measure(job: Job, batch: Batch) -> Times:
    """Median seconds of a step's actions that compute; of an update, of all its parts."""
    runs: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in range(WARM + COUNTED):
        job.step(batch, lr=0.0)
        job.ledger = None  # it has looked at the first step
        found: dict[tuple[str, int], float] = defaultdict(float)
        for event in job.report.trace.events:
            if event.lane in (Lane.COMPUTE, Lane.HOST):
                found[event.kind, event.stage] += event.end - event.start
        for key, value in found.items() if step >= WARM else ():
            runs[key].append(value)
    return {key: median(values) for key, values in runs.items()}
