"""Step times measured instead of computed from rates, before a run starts, where that is quick.

One worker times blocks and, left free to choose, tries one thread too: small models on a busy
machine run faster on it. Of a pipeline the first worker times the actions of one worker alone while
the others wait. Then 1, 2, ... of them compute at once, for the pace of each; how they share the
cores of the machine in a step is simulated with that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outsize.checkpoint.hub import read_config
from outsize.data import Batch, TrainStream
from outsize.hardware.host import cores
from outsize.launch import WorkerGroup
from outsize.models.config import DecoderConfig
from outsize.plan import DISK, FILES, Plan, from_yaml, to_yaml
from outsize.runtime.method import method_of
from outsize.simulate import Forecast
from outsize.simulate.calibrate import COUNTED, WARM, calibrate
from outsize.simulate.shared_cores import ROUNDS, on_cores, paces
from outsize.simulate.worker_profile import COUNTED as TIMED
from outsize.simulate.worker_profile import TURNS, Durations, durations, work
from outsize.simulate.worker_profile import WARM as UNTIMED
from outsize.train.model import subject
from outsize.train.recipe import recipe_of
from outsize.train.resolve import DERIVED, Resolved, apply_text
from outsize.train.setup import Setup
from outsize.train.tiers import opened

TRIAL_SECONDS = 30.0  # a calibration that the machine's rates predict to take longer is left out
FASTER = 0.9  # of the time with all threads: one thread must be so much faster to be taken
PACES = "paces"  # what the first worker tells the others before they compute at once
NOTHING = ""  # where they need not
PACING_SECONDS = 0.8  # of computing at once, where work is short
LONG_SECONDS = 10.0  # computing at once that would take longer is left out


def calibrated(setup: Setup, stream: TrainStream, worker_group: WorkerGroup) -> Setup:
    """The same with step times measured on blocks of each sort. The first of several workers calls
    it, the others `keep_pace`."""
    plan = setup.plan
    special = not method_of(plan.approximate).rehearsed
    # What streams may not fit all at once; jobs of other kinds do other things in a step.
    if setup.forecast.ranks and not (setup.forecast.below or special or _takes_long(setup)):
        return _of_pipeline(setup, stream.batch(0), worker_group)
    no_pace(worker_group)
    trial = setup.forecast.seconds / plan.microbatches * (WARM + COUNTED)
    # Among several, times depend on the others too.
    if special or trial > TRIAL_SECONDS or plan.mesh.size > 1 or not _has_room(setup):
        return setup
    return _alone(setup, stream.batch(0))


def _has_room(setup: Setup) -> bool:
    """Whether a disk holds copies of what stays in files, as a trial of some of it makes."""
    below = setup.forecast.below
    disk = sum(spec.bytes for spec in setup.tiers if spec.name == DISK)
    return not below.get(FILES) or below[FILES] + below.get(DISK, 0) <= disk


def _alone(setup: Setup, batch: Batch) -> Setup:
    threads = setup.resolved.get("threads")
    all_threads = _timed(setup, batch)
    if threads == 1 or not setup.resolved.is_derived("threads"):
        return replace(setup, forecast=all_threads)
    torch.set_num_threads(1)
    single = _timed(setup, batch)
    if single.seconds < FASTER * all_threads.seconds:
        reason = f"a step takes {single.seconds:.3g} s, with {threads} {all_threads.seconds:.3g} s"
        resolved = setup.resolved.with_value("threads", 1, f"{DERIVED}{reason}")
        return replace(setup, resolved=resolved, forecast=single)
    torch.set_num_threads(threads)
    return replace(setup, forecast=all_threads)


def _timed(setup: Setup, batch: Batch) -> Forecast:
    recipe = recipe_of(setup.config)
    return calibrate(
        setup.forecast,
        setup.subject.config,
        recipe,
        lambda rows: batch.rows(0, rows),
        partial(opened, setup.tiers, device=setup.device, tell=str),  # the run itself says it
        setup.device.type,
    )


# -- pipelines -------------------------------------------------------------------------------------


def _takes_long(setup: Setup) -> bool:
    """Whether a pipeline is left untimed: on GPUs, with others in the mesh or on other machines,
    and where it would take long."""
    made, mesh = setup.forecast, setup.plan.mesh
    near = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size)) == mesh.size == mesh.pipeline
    trial = made.seconds / setup.plan.microbatches * 2 * (UNTIMED + TIMED) * TURNS
    return not near or setup.device.type != "cpu" or trial > TRIAL_SECONDS


def _of_pipeline(setup: Setup, batch: Batch, worker_group: WorkerGroup) -> Setup:
    """Of a pipeline on the cores of this machine, and nothing else in the mesh."""
    recipe = recipe_of(setup.config)
    known = durations(
        setup.plan,
        setup.subject.config,
        recipe.optimizer,
        recipe.clip,
        lambda rows: repeated(batch, rows),
    )
    found = _paces(setup, known, worker_group)
    apart = (1.0,) * min(_slots(setup), setup.plan.mesh.size)  # as if cores had nothing in common
    return replace(setup, forecast=on_cores(setup.forecast, known, found or apart), paces=found)


def _slots(setup: Setup) -> int:
    """Workers that can have cores of their own."""
    threads: int = setup.resolved.get("threads")
    return max(1, cores() // threads)


def repeated(batch: Batch, rows: int) -> Batch:
    """So many rows of a batch, the first again behind the last."""
    count = batch.ids_BS.shape[0]
    places = [row % count for row in range(rows)]
    bounds = tuple(batch.bounds[row] for row in places)
    return batch.changed(lambda x_BS: x_BS[places], bounds, batch.noise)


# -- paces -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pacing:
    """How all workers compute at once. directory: of the model, None for a preset. window, rounds:
    as shared_cores.paces has them."""

    values: str
    plan: str
    directory: str | None
    window: float
    rounds: int

    def measured(self, worker_group: WorkerGroup) -> tuple[float, ...]:
        """The paces. Every worker calls it."""
        worker_group.pulse.at("measuring paces")
        resolved = apply_text(Resolved(), self.values, "rank 0")
        torch.set_num_threads(resolved.get("threads"))
        if self.directory is None:
            config = subject(resolved)[1].config
        else:
            config = read_config(Path(self.directory))
        plan = from_yaml(self.plan)
        doing = work(plan, config, recipe_of(resolved.config).optimizer, _rows_of(plan, config))
        return paces(worker_group.world, doing, self.window, self.rounds)


def keep_pace(worker_group: WorkerGroup) -> None:
    """Compute when the first worker asks all to; for the others."""
    text = worker_group.told(PACES, lambda: NOTHING)
    if text != NOTHING:
        said: dict[str, Any] = json.loads(text)
        Pacing(**said).measured(worker_group)


def no_pace(worker_group: WorkerGroup) -> None:
    """Tell the others that paces are not measured."""
    worker_group.told(PACES, lambda: NOTHING)


def _paces(setup: Setup, known: Durations, worker_group: WorkerGroup) -> tuple[float, ...]:
    """How fast a worker computes while 1, 2, ... do, where the others are there and it does not
    take long to measure; else ()."""
    size = setup.plan.mesh.size
    each = sum(known.values()) / size  # of a worker; of both ways to take gradients
    once = sum(size * each * max(1.0, count / _slots(setup)) for count in range(1, size + 1))
    if worker_group.post is None or once > LONG_SECONDS:
        no_pace(worker_group)
        return ()
    rounds = max(1, min(ROUNDS, int(PACING_SECONDS / once)))
    directory = setup.subject.directory
    said = Pacing(
        setup.resolved.to_yaml(),
        to_yaml(setup.plan),
        None if directory is None else str(directory.resolve()),
        PACING_SECONDS / rounds / size,
        rounds,
    )
    worker_group.told(PACES, lambda: json.dumps(vars(said)))
    return said.measured(worker_group)


def _rows_of(plan: Plan, config: DecoderConfig) -> Callable[[int], Batch]:
    """Rows like the run's: one document of as many tokens, all of them others."""

    def rows(count: int) -> Batch:
        ids = torch.arange(count * plan.sequence).reshape(count, plan.sequence) % config.vocab
        return Batch(ids, ids, ((0, plan.sequence),) * count)

    return rows
