"""Step times measured instead of computed from rates, before a run starts, where that is quick.

All workers time blocks at once. One alone that is left free to choose tries one thread too: small
models on a busy machine run faster on it. Of a pipeline the first worker times the actions of one
worker alone while the others wait. Then 1, 2, ... of them compute at once, for the pace of each;
how they share the cores of the machine in a step is simulated with that.
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

from outsize.data import IGNORE, Batch, TrainStream
from outsize.hardware.host import cores, keep_freed, memory, own_mappings
from outsize.launch import WorkerGroup
from outsize.models.config import DecoderConfig
from outsize.models.dropout import Noise
from outsize.plan import DISK, FILES, Plan, from_yaml, to_yaml
from outsize.runtime.method import method_of
from outsize.runtime.recipe import Here
from outsize.schedule import Kind
from outsize.simulate.calibrate import Times, blocks, calibrate, portion, retimed, timed
from outsize.simulate.shared_cores import ROUNDS, on_cores, paces
from outsize.simulate.trial import lasts
from outsize.simulate.worker_profile import COUNTED, TURNS, WARM, Durations, durations, work
from outsize.train.model import config_in, subject
from outsize.train.recipe import recipe_of
from outsize.train.resolve import DERIVED, Resolved, apply_text
from outsize.train.setup import Setup
from outsize.train.tiers import named, opened

TRIAL_SECONDS = 30.0  # a calibration that the machine's rates predict to take longer is left out
HOLES = 2  # of a budget, what buffers and the holes between them may take of a heap that keeps both
FASTER = 0.9  # of the time with all threads: one thread must be so much faster to be taken
TRIAL = "trial"  # what the first worker tells the others before they compute at once
NOTHING = ""  # where they need not
PACING_SECONDS = 0.8  # of computing at once, where work is short
ROUNDS_SECONDS = 4.0  # of computing at once, where it is longer
LONG_SECONDS = 10.0  # computing at once that would take longer is left out


def calibrated(setup: Setup, stream: TrainStream, worker_group: WorkerGroup) -> Setup:
    """The same with step times measured on blocks of each sort. The first of several workers calls
    it, the others `keep_pace`."""
    plan, made = setup.plan, setup.forecast
    set_heap(plan)
    special = not method_of(plan.approximate).rehearsed
    whole = special or made.ranks
    sampled = 1.0 if whole else portion(made, blocks(plan, setup.subject.config))
    trial = lasts(made.seconds / plan.microbatches * sampled)
    # What streams may not fit all at once; jobs of other kinds do other things in a step.
    if plan.mesh.size > 1 and not (made.below or special):
        if made.ranks and not _takes_long(setup):
            return _of_pipeline(setup, stream.batch(0), worker_group)
        if not made.ranks and worker_group.post is not None and trial <= TRIAL_SECONDS:
            return _of_all(setup, stream.batch(0), worker_group)
    no_pace(worker_group)
    if special or trial > TRIAL_SECONDS or plan.mesh.size > 1 or not _has_room(setup):
        return setup
    return _alone(setup, stream.batch(0))


def set_heap(plan: Plan) -> None:
    """Let this process give freed memory back where the machine has little beyond the run's budget,
    and keep some where it has, or where there is room for all states; while blocks are timed as in
    the run."""
    if plan.budget is not None and memory().available < HOLES * plan.budget * plan.mesh.size:
        own_mappings()
    elif plan.budget is not None or not named(plan):
        keep_freed()


def _has_room(setup: Setup) -> bool:
    """Whether a disk holds copies of what stays in files, as a trial of some of it makes."""
    below = setup.forecast.below
    disk = sum(spec.bytes for spec in setup.tiers if spec.name == DISK)
    return not below.get(FILES) or below[FILES] + below.get(DISK, 0) <= disk


def _alone(setup: Setup, batch: Batch) -> Setup:
    """With all threads, and with one where the run leaves their number open."""
    threads: int = setup.resolved.get("threads")
    counts = (threads, 1) if threads > 1 and setup.resolved.is_derived("threads") else (threads,)
    all_threads, *others = calibrate(
        setup.forecast,
        setup.subject.config,
        recipe_of(setup.config),
        lambda rows: batch.rows(0, rows),
        partial(opened, setup.tiers, device=setup.device, tell=str),  # the run itself says it
        setup.device.type,
        counts,
    )
    for single in others:
        if single.seconds < FASTER * all_threads.seconds:
            whole = all_threads.seconds
            reason = f"a step takes {single.seconds:.3g} s, with {threads} {whole:.3g} s"
            resolved = setup.resolved.with_value("threads", 1, f"{DERIVED}{reason}")
            torch.set_num_threads(1)
            return replace(setup, resolved=resolved, forecast=single)
    torch.set_num_threads(threads)
    return replace(setup, forecast=all_threads)


# -- several workers -------------------------------------------------------------------------------


def _of_all(setup: Setup, batch: Batch, worker_group: WorkerGroup) -> Setup:
    """Of a mesh without a pipeline: all have the same actions, each its part of the work."""
    chosen = blocks(setup.plan, setup.subject.config)
    rows = _Rows.of(batch.rows(0, chosen.plan.own_rows))
    trial = Blocks(*_subject(setup, setup.plan), vars(rows), setup.device.type)
    times = _together(trial, worker_group)
    return replace(setup, forecast=retimed(setup.forecast, chosen, times))


# -- pipelines -------------------------------------------------------------------------------------


def _takes_long(setup: Setup) -> bool:
    """Whether a pipeline is left untimed: on GPUs, with layers that are cut or on other machines,
    and where it would take long."""
    made, mesh = setup.forecast, setup.plan.mesh
    copies = mesh.pipeline * mesh["data"]
    near = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size)) == mesh.size == copies
    trial = made.seconds / setup.plan.microbatches * 2 * (WARM + COUNTED) * TURNS
    return not near or setup.device.type != "cpu" or trial > TRIAL_SECONDS


def _of_pipeline(setup: Setup, batch: Batch, worker_group: WorkerGroup) -> Setup:
    """Of a pipeline on the cores of this machine, or copies of it with different rows."""
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


# -- what all do at once ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What all workers try. directory: of the model, None for a preset."""

    values: str
    plan: str
    directory: str | None

    def resolved(self) -> tuple[Resolved, Plan, DecoderConfig]:
        """The run's values, its plan and its model. Sets the run's number of threads."""
        resolved = apply_text(Resolved(), self.values, "rank 0")
        torch.set_num_threads(resolved.get("threads"))
        if self.directory is None:
            config = subject(resolved)[1].config
        else:
            config = config_in(Path(self.directory), resolved.config)
        plan = from_yaml(self.plan)
        set_heap(plan)
        return resolved, plan, config


def _subject(setup: Setup, plan: Plan) -> tuple[str, str, str | None]:
    """The fields of a Subject."""
    directory = setup.subject.directory
    where = None if directory is None else str(directory.resolve())
    return setup.resolved.to_yaml(), to_yaml(plan), where


@dataclass(frozen=True)
class Pacing(Subject):
    """How all workers compute at once. window, rounds: as shared_cores.paces has them."""

    window: float
    rounds: int

    def measured(self, worker_group: WorkerGroup) -> tuple[float, ...]:
        """The paces. Every worker calls it."""
        worker_group.pulse.at("measuring paces")
        resolved, plan, config = self.resolved()
        doing = work(plan, config, recipe_of(resolved.config).optimizer, _rows_of(plan, config))
        return paces(worker_group.world, doing, self.window, self.rounds)


@dataclass(frozen=True)
class Blocks(Subject):
    """Blocks of each sort as all workers of a plan compute them. rows: fields of _Rows, those of
    the step that its largest microbatch has. device: its type."""

    rows: dict[str, Any]
    device: str

    def measured(self, worker_group: WorkerGroup) -> Times:
        """Seconds of their actions. Every worker calls it."""
        worker_group.pulse.at("timing blocks")
        resolved, plan, config = self.resolved()
        chosen, batch = blocks(plan, config), _Rows(**self.rows).batch()
        here = Here(worker_group.world, at=worker_group.pulse.at)
        recipe = recipe_of(resolved.config)
        return timed(chosen, recipe, lambda count: batch.rows(0, count), here, self.device)[0]


TRIALS = {one.__name__: one for one in (Pacing, Blocks)}


@dataclass(frozen=True)
class _Rows:
    """A batch as words have it. Weights are left out, which change no time."""

    ids: list[list[int]]
    targets: list[list[int]]
    bounds: list[tuple[int, ...]]
    noise: dict[str, Any] | None

    @classmethod
    def of(cls, batch: Batch) -> _Rows:
        noise = None if batch.noise is None else vars(batch.noise)
        return cls(batch.ids_BS.tolist(), batch.targets_BS.tolist(), list(batch.bounds), noise)

    def batch(self) -> Batch:
        noise = None if self.noise is None else Noise(**self.noise)
        bounds = tuple(map(tuple, self.bounds))
        return Batch(torch.tensor(self.ids), torch.tensor(self.targets), bounds, noise)


def _together(trial: Any, worker_group: WorkerGroup) -> Any:
    """What is measured once the others have been told to do the same."""
    worker_group.told(TRIAL, lambda: json.dumps([type(trial).__name__, vars(trial)]))
    return trial.measured(worker_group)


def keep_pace(worker_group: WorkerGroup) -> None:
    """Compute when the first worker asks all to; for the others."""
    text = worker_group.told(TRIAL, lambda: NOTHING)
    if text != NOTHING:
        name, said = json.loads(text)
        TRIALS[name](**said).measured(worker_group)


def no_pace(worker_group: WorkerGroup) -> None:
    """Tell the others that nothing is measured."""
    worker_group.told(TRIAL, lambda: NOTHING)


def _paces(setup: Setup, known: Durations, worker_group: WorkerGroup) -> tuple[float, ...]:
    """How fast a worker computes while 1, 2, ... do, where the others are there and it does not
    take long to measure; else ()."""
    size = setup.plan.mesh.size
    apart = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)  # not so in what is tried here
    every = sum(known[key] for key in known if key[0] not in apart)
    each = every / setup.plan.mesh.pipeline  # of a worker
    once = sum(size * each * max(1.0, count / _slots(setup)) for count in range(1, size + 1))
    if worker_group.post is None or once > LONG_SECONDS:
        no_pace(worker_group)
        return ()
    rounds = max(1, min(ROUNDS, int(ROUNDS_SECONDS / once)))
    window = PACING_SECONDS / rounds / size
    found: tuple[float, ...] = _together(
        Pacing(*_subject(setup, setup.plan), window, rounds), worker_group
    )
    return found


def _rows_of(plan: Plan, config: DecoderConfig) -> Callable[[int], Batch]:
    """Rows like the run's: one document of as many tokens, all of them others."""

    def rows(count: int) -> Batch:
        ids = torch.arange(count * plan.sequence).reshape(count, plan.sequence) % config.vocab
        targets = ids.clone()
        targets[:, : config.virtual] = IGNORE
        return Batch(ids, targets, ((0, plan.sequence),) * count)

    return rows
