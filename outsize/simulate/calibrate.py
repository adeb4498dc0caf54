"""Calibration: the times of a plan's actions, measured on one block of each sort.

Rates of a machine predict a step that cannot be run; where a block can be, it is better asked. A
model with one layer of each sort that the plan has, and the whole prologue and epilogue, makes a
few steps of one microbatch each, on all workers of the plan at once, from its tiers; what its
actions compute and say to each other stands for all their like. So a worker has what it will have:
its rows, its part of every weight, cores that others use too. What moves between tiers takes what
their rates say. Pipelines are for outsize/simulate/worker_profile.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from statistics import mean

import torch

from outsize import accelerator
from outsize.collectives.world import World, told
from outsize.data import Batch
from outsize.memory.allocator import meter
from outsize.memory.ledger import OverBudget
from outsize.memory.store import Store
from outsize.models.build import repeated_draw, shells
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
from outsize.simulate.trial import WARM, counted, later, middle

MEASURED = (Lane.COMPUTE, Lane.HOST, Lane.NETWORK)
StoresOf = Callable[[Plan, Mapping[str, int]], AbstractContextManager[Mapping[str, Store]]]
Batches = Callable[[int], Batch]  # of so many rows
Name = tuple[str, str, int]  # lane, label and stage of an action
Times = Mapping[Name, float]  # seconds; stages are the sample's


def calibrate(
    made: Forecast,
    config: DecoderConfig,
    recipe: Recipe,
    batch_of: Batches,
    stores_of: StoresOf,
    device: str = "cpu",
    threads: Sequence[int] = (),
) -> list[Forecast]:
    """The forecast of one worker with times measured on this machine instead of computed from
    rates, by so many threads each (none: those that are set; the last stay set); as it is where one
    block of each sort does not fit the budget.

    batch_of(rows): real rows, for their documents decide what attention costs. stores_of: the tiers
    below of a plan that rests so many bytes on them. Holds one block of each sort, the prologue and
    the epilogue with their states while it runs, where the run itself would hold them.
    """
    chosen = blocks(made.plan, config)
    resting = below(made.placements[0], {}, {chosen.stands.index(i) for i in set(chosen.stands)})
    where, budget = accelerator.named(device), made.plan.budget
    try:
        with stores_of(chosen.plan, resting) as stores:
            kept = accelerator.reserved(where)
            ledger = None if budget is None else meter(where, budget, reserved=kept)
            here = Here(ledger=ledger, stores=stores)
            times = timed(chosen, recipe, batch_of, here, device, threads)
    except OverBudget:
        return [made] * max(1, len(threads))
    return [retimed(made, chosen, each) for each in times]


def blocks(plan: Plan, config: DecoderConfig) -> Sample:
    """One layer of each sort, whose states rest where those of the first of its sort do, in one
    microbatch of each worker."""
    spans = (plan.rows_of(0, place) for place in range(plan.mesh.rows))
    counts = tuple(stop - start for start, stop in spans)
    shares = counts if plan.row_shares else ()
    one = replace(plan, rows=sum(counts), microbatch_rows=max(counts), row_shares=shares)
    chosen = sample(config, one)
    rest = {i: stage.rest for stage in plan.stages for i in range(stage.first, stage.last)}
    first = (rest[chosen.stands.index(place)] for place in range(len(chosen.plan.stages)))
    stages = (
        replace(stage, rest=replace(one, activations=DEVICE))
        for stage, one in zip(chosen.plan.stages, first, strict=True)
    )
    stream = replace(chosen.plan.stream, pool=0)
    return replace(chosen, plan=replace(chosen.plan, stages=tuple(stages), stream=stream))


def portion(made: Forecast, chosen: Sample) -> float:
    """The part of the actions of a step, in predicted seconds, that its sample has."""
    first = {chosen.stands.index(place) for place in range(len(chosen.plan.stages))}
    parts = [
        sum(stage.first <= i < stage.last for i in first) / (stage.last - stage.first)
        for stage in made.plan.stages
    ]
    whole = part = 0.0
    for event in made.trace.events:
        seconds = event.end - event.start
        whole += seconds
        part += seconds * (1.0 if event.stage == WHOLE else parts[event.stage])
    return part / whole if whole else 1.0


def timed(
    chosen: Sample,
    recipe: Recipe,
    batch_of: Batches,
    here: Here,
    device: str = "cpu",
    threads: Sequence[int] = (),
) -> list[Times]:
    """Seconds of the actions of a sample's step, by so many threads each: of an update, of all its
    parts; of NORM, of one parameter. Every worker of the plan calls it, and all have the same."""
    plan, world = chosen.plan, here.world
    start, stop = plan.rows_at(plan.mesh.rows_index(world.rank))
    model = shells(chosen.config, torch.float32, device)
    made = NativeModel(model, fill=repeated_draw(model, seed=0))
    every = list[Sequence[dict[Name, float]]]()
    with closing(make_job(made, plan, recipe, here)) as job:
        numel = sum(chunk.table.numel for chunk in job.chunks)
        for count in threads or (torch.get_num_threads(),):
            torch.set_num_threads(count)
            every.append(_steps(job, batch_of(stop - start)))
    return [_told(world, steps, numel) for steps in every]


def _told(world: World, steps: Sequence[dict[Name, float]], numel: int) -> Times:
    """What all workers agree on, of the steps of each."""
    names = sorted(steps[0])
    said = told(world, [step[name] for step in steps for name in names])
    found = {
        name: agreed(name, [each[place :: len(names)] for each in said])
        for place, name in enumerate(names)
    }
    return {n: found[n] / numel if n[1] == Kind.NORM else found[n] for n in names}


def _steps(job: Job, batch: Batch) -> Sequence[dict[Name, float]]:
    """By step that tells, seconds of each action: of the passes of one microbatch, of all parts.
    All workers make as many as the slowest of them finds enough."""
    steps, count = list[dict[Name, float]](), WARM + 1
    while len(steps) < count:
        job.step(batch, lr=0.0)
        job.ledger = None  # it has looked at the first step
        if len(steps) == WARM:
            (longest,) = map(max, zip(*told(job.world, [job.report.seconds]), strict=True))
            count = WARM + counted(longest)
        runs: dict[tuple[Name, int], list[float]] = defaultdict(list)
        for event in job.report.trace.events:
            if event.lane in MEASURED:
                name = (str(event.lane), event.kind, event.stage)
                runs[name, event.part].append(event.end - event.start)
        found: dict[Name, float] = defaultdict(float)
        for (name, _), seconds in runs.items():
            found[name] += mean(seconds)  # parameters come for each of a stage's passes
        steps.append(dict(found))
    return later(steps[WARM:])


def agreed(name: Name, seconds: Sequence[Sequence[float]]) -> float:
    """Seconds of an action, from those of each worker by step. They wait for the slowest. Whoever
    comes last to where all meet waits for nobody: he has the time that it takes."""
    lane, label, _ = name
    if lane == Lane.NETWORK or label == Kind.NORM:
        return middle([min(each) for each in zip(*seconds, strict=True)])
    return max(map(middle, seconds))


def retimed(made: Forecast, chosen: Sample, times: Times) -> Forecast:
    """A forecast, but no pipeline's, with the times of its sample's actions."""
    known = {(e.lane, e.kind, e.stage, e.part): e.end - e.start for e in made.trace.events}

    def seconds(_: int, action: Action) -> float:
        lane, label = action.lane.value, action.label
        if action.lane not in MEASURED:
            return known[lane, label, action.stage, action.part]
        if action.kind is Kind.NORM:
            return times[lane, label, WHOLE] * made.parameters
        stage = made.plan.stages[action.stage]
        names = [(lane, label, chosen.stands[i]) for i in range(stage.first, stage.last)]
        if action.kind is Kind.UPDATE and not times.keys() >= set(names):
            # States of its like rest elsewhere, so that these are updated on the other lane.
            return known[lane, label, action.stage, action.part]
        whole = sum(times[name] for name in names)
        if action.part == WHOLE:
            return whole
        return whole / len(made.placements[0].items.pieces[action.stage])

    trace = play(made.schedule, made.static, seconds)
    return replace(made, trace=trace, seconds=trace.span())
