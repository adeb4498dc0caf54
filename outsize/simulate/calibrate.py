"""Calibration: the times of a plan's actions, measured on one block of each sort.

Rates of a machine predict a step that cannot be run; where a block can be, it is better asked. A
model with one layer of each sort that the plan has, and the whole prologue and epilogue, makes a
few steps of one microbatch each; its actions' times stand for all their like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from outsize.data import Batch
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.optim import Optimizer
from outsize.runtime import Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Recipe
from outsize.schedule import Action, Kind
from outsize.simulate.forecast import Forecast
from outsize.simulate.replay import play
from outsize.simulate.sample import sample

WARM, COUNTED = 1, 3  # steps; the first of a process pays for page faults and kernel set-up


def calibrate(
    made: Forecast,
    config: DecoderConfig,
    optimizer: Optimizer,
    clip: float | None,
    batch_of: Callable[[int], Batch],
    device: str = "cpu",
) -> Forecast:
    """The forecast with times measured on this machine instead of computed from rates.

    batch_of(rows): real rows, for their documents decide what attention costs. Holds one block of
    each sort, the prologue and the epilogue with their states while it runs.
    """
    chosen = sample(config, replace(made.plan, rows=made.plan.microbatch_rows))
    model = build(chosen.config, seed=0, device=device)
    job = make_job(NativeModel(model), chosen.plan, Recipe(optimizer, clip))
    times = _measure(job, batch_of(chosen.plan.rows))
    norm = times.pop((Kind.NORM, -1)) * made.parameters / sum(c.table.numel for c in job.chunks)

    def seconds(_: int, action: Action) -> float:
        if action.kind is Kind.NORM:
            return norm
        stage = made.plan.stages[action.stage]
        places = (chosen.stands[i] for i in range(stage.first, stage.last))
        return sum(times[action.kind, place] for place in places)

    trace = play(made.schedule, made.static, seconds)
    return replace(made, trace=trace, seconds=trace.span())


def _measure(job: Job, batch: Batch) -> dict[tuple[Kind, int], float]:
    """Median seconds of every action."""
    runs: dict[tuple[Kind, int], list[float]] = {}
    for step in range(WARM + COUNTED):
        job.step(batch, lr=0.0)
        if step >= WARM:
            for event in job.report.trace.events:
                runs.setdefault((Kind(event.kind), event.stage), []).append(event.end - event.start)
    job.close()
    return {key: median(values) for key, values in runs.items()}
