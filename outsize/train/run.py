"""A whole run: set up, predict, train, report. New, or gone on with from its directory.

runs/mine/run.yaml        every value of the run; plan.yaml: its plan
runs/mine/step-00000100/  checkpoints, each a Hugging Face directory
runs/mine/metrics.jsonl   and events.*: TensorBoard
runs/mine/timeline.html   one step of all workers, predicted and measured; trace.json: for Perfetto;
                          predicted.json, measured.json: for outsize trace diff
runs/mine/sample.txt      what the trained model wrote
runs/mine/workers/        what other workers than the first printed

Of several workers the first plans the run and says how it is to be; the others take that over, and
from then on all run the same code. The first alone writes what there is one of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outsize import accelerator, typed
from outsize.checkpoint.opened import Checkpoint, DamageError
from outsize.checkpoint.store import OnDamage
from outsize.checkpoint.store import Store as Checkpoints
from outsize.data import check_paths
from outsize.decode.text import check_prompt
from outsize.errors import OutsizeError, counted
from outsize.hardware import Hardware
from outsize.launch import WorkerGroup
from outsize.memory import Meter, meter
from outsize.memory.store import Store
from outsize.models.build import shells
from outsize.plan import FILES, from_yaml, to_yaml
from outsize.runtime.job import Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here
from outsize.runtime.storage.base_files import BaseFiles
from outsize.screen import say, show
from outsize.simulate.kept import mark
from outsize.techniques import callbacks
from outsize.techniques.callbacks import Running, Told
from outsize.texts import read_text, write_text
from outsize.train.base import Base
from outsize.train.config import had_of, may_change, restated
from outsize.train.derive import warmup_now
from outsize.train.ending import finish, say_stopped
from outsize.train.history import corrected, noted
from outsize.train.loop import Loop, resume_command
from outsize.train.measure import Measure
from outsize.train.metrics import Metrics, Unwritten, read_metrics
from outsize.train.model import subject_of
from outsize.train.opening import Ready, data_of, read_length, ready_of, show_plan, streamed
from outsize.train.recipe import data_config, options_of, recipe_of
from outsize.train.resolve import (
    DERIVED,
    RUN,
    Resolved,
    apply_text,
    length_now,
    recorded_values,
    shown,
)
from outsize.train.setup import Setup, set_up, settled
from outsize.train.show import values_table
from outsize.train.state import (
    Place,
    first_values,
    place_of,
    restore,
    same_run,
)
from outsize.train.stop import Stop
from outsize.train.tiers import opened
from outsize.train.timing import keep_pace, no_pace, set_heap

PLAN = "plan.yaml"
NOTHING = ""  # what the first worker says where there is nothing to do


def explain(resolved: Resolved, console: Console) -> None:
    """Print every value and where it came from, and the plan; start nothing."""
    setup = settled(corrected(noted(read_length(set_up(resolved), console), "rates")))
    show(console, values_table(setup.resolved))
    show_plan(setup, console)


def start(resolved: Resolved, console: Console, worker_group: WorkerGroup | None = None) -> int:
    """Start a new run; gives the exit code: 0, or 128 + the signal that stopped it.

    worker_group: the workers, of which this is the first; the others `follow`.
    """
    worker_group = worker_group or WorkerGroup()
    worker_group.pulse.at("planning")
    own = data_config(resolved.config, "bytes")
    check_paths((*own.paths(), *own.evaluation))
    check_prompt(resolved.config.sample.prompt or "")
    if resolved.config.output is not None:  # before data are read and blocks timed
        _refuse_another(Checkpoints(resolved.config.output))
    setup = set_up(resolved)
    ready = ready_of(setup, console, worker_group)
    store = _store(ready.setup)
    with store:
        _refuse_another(store)
        write_text(ready.setup.resolved.to_yaml(), store.directory / RUN)
        write_text(to_yaml(replace(setup.plan, budget=None)), store.directory / PLAN)
        _say(ready, store, None, worker_group)
        return _train(ready, store, None, console, worker_group)


def resume(
    directory: Path,
    changes: Iterable[tuple[str, object, str]],
    on_damage: OnDamage,
    console: Console,
    worker_group: WorkerGroup | None = None,
) -> int:
    """Go on with the run in `directory`; gives the exit code.

    changes: (key, value, origin) that differ from the run's own values. OutsizeError for a change
    that would give other numbers, and for a run that is not there. worker_group: as in `start`.
    """
    worker_group = worker_group or WorkerGroup()
    worker_group.pulse.at("reading the checkpoint")
    recorded = recorded_values(directory)
    resolved = _changed(recorded, changes, directory)
    store = Checkpoints(directory, resolved.get("train.keep"))
    with store:
        try:
            found = None if store.latest() is None else store.load(on_damage=on_damage)
            return _go_on(store, found, recorded, resolved, console, worker_group)
        except DamageError as error:
            earlier = [step for step in store.steps() if step < (store.latest() or 0)]
            way = f"; --on-damage previous goes on from step {earlier[-1]}" if earlier else ""
            raise OutsizeError(f"{error}{way}") from error


def _go_on(
    store: Checkpoints,
    found: Checkpoint | None,
    recorded: Resolved,
    resolved: Resolved,
    console: Console,
    worker_group: WorkerGroup,
) -> int:
    directory, model, changed = store.directory, None, dict[str, tuple[Any, Any]]()
    if found is not None:
        for passed in found.passed_over:
            say(console, f"passed over: {passed}")
        changed = same_run(found, resolved)
        if place_of(found).step >= (resolved.get("train.steps") or math.inf):
            no_pace(worker_group)
            return _finished(found, directory, console, worker_group)
        model = subject_of(found, resolved)
    else:
        _refuse_lost(store, resolved)
        say(console, f"no step of the run in {directory} was saved: it begins anew")
    _tell_threads(recorded, resolved, console)
    plan = None if "train.batch_tokens" in changed else from_yaml(read_text(directory / PLAN))
    setup = set_up(resolved, plan, model)
    ready = ready_of(setup, console, worker_group, None if found is None else place_of(found))
    if found is not None and found.step >= ready.setup.resolved.get("train.steps"):
        return _finished(found, directory, console, worker_group)
    for name, (then, now) in changed.items():
        say(console, f"from here on {name} is {shown(now)}, where the run had {shown(then)}")
    write_text(ready.setup.resolved.to_yaml(), directory / RUN)
    write_text(to_yaml(replace(setup.plan, budget=None)), directory / PLAN)
    _say(ready, store, found, worker_group)
    return _train(ready, store, found, console, worker_group)


def follow(console: Console, worker_group: WorkerGroup) -> int:
    """Take part in the run that the first worker starts or goes on with; gives the exit code."""
    keep_pace(worker_group)
    text = worker_group.told(RUN, lambda: NOTHING)
    if text == NOTHING:
        return 0
    said = json.loads(text)
    worker_group.pulse.at("taking over the plan")
    resolved = apply_text(Resolved(), said["values"], "rank 0")
    store = Checkpoints(said["directory"], resolved.get("train.keep"))
    worker_group.output(store.directory)
    found = None if said["step"] is None else store.load(said["step"])
    model = None if found is None else subject_of(found, resolved)
    hardware = typed.read(Hardware, said["hardware"], "rank 0")
    plan, seen = from_yaml(said["plan"]), bool(said["model"])  # none: it has no mark
    setup = set_up(resolved, plan, model, hardware=hardware, seen=seen)
    if mark(setup.subject.config) != said["model"]:  # what it has seen to is of its own
        raise OutsizeError(
            f"rank {worker_group.rank}: model: {resolved.get('model.name')!r} is another model here"
            " than on rank 0; expected the same files on every machine"
        )
    ready = streamed(setup, data_of(setup, console, worker_group))
    return _train(ready, store, found, console, worker_group)


def _say(
    ready: Ready, store: Checkpoints, found: Checkpoint | None, worker_group: WorkerGroup
) -> None:
    """Tell the other workers what the run is."""
    said = {
        "values": ready.setup.resolved.to_yaml(),
        "plan": to_yaml(ready.setup.plan),
        "hardware": typed.plain(ready.setup.hardware),
        "directory": str(store.directory.resolve()),
        "step": None if found is None else found.step,
        "model": mark(ready.setup.subject.config),
    }
    worker_group.told(RUN, lambda: json.dumps(said))


def _changed(
    recorded: Resolved, changes: Iterable[tuple[str, object, str]], directory: Path
) -> Resolved:
    resolved, changes = recorded, tuple(changes)
    for name, value, origin in changes:
        had = had_of(recorded.values, name)
        if name == "output" or value == had:
            continue
        if not may_change(name) and not restated(name):
            had_not = f"out {name.rpartition('.')[0]}" if had is None else f" {had!r}"
            raise OutsizeError(
                f"{name} is {value!r} ({origin}), but the run in {directory} was started with"
                f"{had_not}: set it back, or start a new run in another directory"
            )
        resolved = resolved.with_value(name, value, origin)
    said = {name for name, _, _ in changes}
    resolved = length_now(recorded, resolved, said)
    steps, now = resolved.get("train.steps"), None
    if steps != recorded.get("train.steps") and "learning_rate.warmup" not in said:
        now = warmup_now(recorded.values, steps)
    if now not in (None, recorded.get("learning_rate.warmup")):
        resolved = resolved.with_value(
            "learning_rate.warmup", now, f"{DERIVED}of {counted(steps, 'step')}"
        )
    return resolved


def _refuse_lost(store: Checkpoints, resolved: Resolved) -> None:
    """Refuse to begin anew where steps were saved once and are gone."""
    made = max((int(record["step"]) for record in read_metrics(store.directory)), default=0)
    every = resolved.get("train.save_every")
    due = isinstance(every, int) and 0 < every < made
    if store.pointed is not None or due:
        raise OutsizeError(
            f"the run in {store.directory} made {counted(max(made, store.pointed or 0), 'step')},"
            " and none of"
            " its checkpoints is there any more: put one of its step-* directories back, or start a"
            " new run in another directory"
        )


def _finished(
    found: Checkpoint, directory: Path, console: Console, worker_group: WorkerGroup
) -> int:
    say(
        console,
        f"the run in {directory} is finished: step {found.step} of {place_of(found).steps}; nothing"
        " to do (--set train.steps=..., or more epochs, goes on for longer)",
    )
    worker_group.told(RUN, lambda: NOTHING)
    return 0


def _tell_threads(recorded: Resolved, resolved: Resolved, console: Console) -> None:
    then, now = recorded.get("threads"), resolved.get("threads")
    if then != now:
        say(
            console,
            f"threads: {now}, where the run had {then}: sums are taken in another order, so the"
            " numbers may differ in their last bits",
        )


def _refuse_another(store: Checkpoints) -> None:
    """OutsizeError where a run's checkpoints are."""
    if store.steps():
        raise OutsizeError(
            f"output {store.directory} holds a run already (step {store.latest()}): go on with"
            f" {resume_command(store.directory)}, or choose another directory"
        )


def _store(setup: Setup) -> Checkpoints:
    assert setup.config.output is not None
    return Checkpoints(setup.config.output, setup.config.train.keep)


def _train(
    ready: Ready,
    store: Checkpoints,
    found: Checkpoint | None,
    console: Console,
    worker_group: WorkerGroup,
) -> int:
    worker_group.pulse.at("making the job")
    setup, data, stream = ready.setup, ready.data, ready.stream
    keys = setup.config.train
    assert keys.steps is not None
    place = Place(0, keys.steps, 0, stream.cursor(0))
    below = setup.forecast.below_of(setup.plan.mesh.index("pipeline", worker_group.rank))
    set_heap(setup.plan)
    tell, base = partial(say, console), Base(setup.subject, store.directory)
    worker_group.in_turn("base", lambda: base.make(setup.forecast.below, tell))
    with (
        Stop() as stop,
        opened(setup.tiers, setup.plan, below, setup.device, tell) as tiers,
        base.opened(below, setup.device) as files,
    ):
        stores: dict[str, Store] = {**tiers, **files}
        reserved = accelerator.reserved(setup.device)
        ledger = meter(setup.device, setup.plan.budget, reserved=reserved)
        job = _job(setup, found, ledger, stores, worker_group)
        if found is not None:
            place = replace(restore(found, job), steps=keys.steps)
            other = any(name.startswith("data.") for name in same_run(found, setup.resolved))
            stream.resume(place.cursor, place.step, other)
            console.print(f"going on from step {place.step} of {place.steps}", markup=False)
        saved = None if found is None else found.step
        measure = Measure(ledger, place.step, place.steps)
        kept = (
            Metrics(store.directory, place.step) if worker_group.first else nullcontext(Unwritten())
        )
        with kept as metrics:
            loop = Loop(
                setup,
                data,
                job,
                store,
                metrics,
                measure,
                place,
                stream,
                saved,
                worker_group,
                told=_told(ready, store, place.step, worker_group),
            )
            with closing(job):
                loop.run(console, stop)
                if loop.ended and loop.told.run.reason:
                    say(console, f"ended after step {loop.place.step}: {loop.told.run.reason}")
                elif not loop.place.finished and not loop.ended:
                    say_stopped(loop, console)
                    return stop.code
                finish(loop, console)
    return 0


def _told(ready: Ready, store: Checkpoints, step: int, worker_group: WorkerGroup) -> Told:
    """The callbacks of a run that stands behind `step`. OutsizeError for one that is not there."""
    resolved, held_out = ready.setup.resolved, ready.data.validation.tokens > 0
    own = resolved.config.technique(callbacks.KEY)
    found = callbacks.made(own, held_out) if own is not None and worker_group.first else []
    before = (record for record in read_metrics(store.directory) if callbacks.MEASURE in record)
    records = [record for record in before if record["step"] <= step]
    values = {name: resolved.get(name) for name, *_ in resolved.rows()}
    return Told(Running(store.directory, values, records), found)


def _job(
    setup: Setup,
    found: Checkpoint | None,
    ledger: Meter,
    stores: Mapping[str, Store],
    worker_group: WorkerGroup,
) -> Job:
    """The job, its weights where they rest: drawn, of the model's directory, or of `found`."""
    config, plan, keys = setup.subject.config, setup.plan, setup.config
    # In the precision that the optimizer updates.
    dtype = getattr(torch, plan.precision.master or plan.precision.compute)
    model = shells(config, dtype, setup.device)
    fill = first_values(model, keys, found)
    at = worker_group.pulse.at if plan.mesh.size > 1 else None
    files = stores.get(FILES)
    stays = files.lies if isinstance(files, BaseFiles) else {}
    here = Here(worker_group.world, ledger, stores, at, lying=stays)
    made = NativeModel(model, options_of(keys), fill=fill)
    return make_job(made, plan, recipe_of(keys), here)
