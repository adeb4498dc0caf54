"""A whole run: set up, foretell, train, report. New, or gone on with from its directory.

runs/mine/run.yaml        every value of the run; plan.yaml: its plan
runs/mine/step-00000100/  checkpoints, each a Hugging Face directory
runs/mine/metrics.jsonl   and events.*: TensorBoard
runs/mine/timeline.html   one step, foretold and measured; trace.json: for Perfetto
runs/mine/sample.txt      what the trained model wrote
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from outsize.checkpoint.opened import Checkpoint, DamageError
from outsize.checkpoint.store import OnDamage
from outsize.checkpoint.store import Store as Checkpoints
from outsize.data import Data, DataConfig, TrainStream, open_data
from outsize.decode.samplers import Sampling
from outsize.errors import OutsizeError
from outsize.memory import Meter, meter
from outsize.memory.store import Store
from outsize.models.build import initial_draw, shells
from outsize.plan import from_yaml, to_yaml
from outsize.runtime import Job, NativeFlow
from outsize.train.config import MAY_CHANGE
from outsize.train.filling import hub_fill
from outsize.train.loop import Loop, closing, resume_command
from outsize.train.measure import Measure
from outsize.train.metrics import Metrics
from outsize.train.model import subject_of
from outsize.train.resolve import Resolved, apply_text
from outsize.train.sample import sample
from outsize.train.setup import Setup, calibrated, optimizer_of, set_up, settled
from outsize.train.show import bytes_table, foretold, plan_table, values_table
from outsize.train.state import Place, place_of, restore, same_run, weights_of
from outsize.train.stop import Stop
from outsize.train.tiers import opened

RUN, PLAN, SAMPLE = "run.yaml", "plan.yaml", "sample.txt"


def explain(resolved: Resolved, console: Console) -> None:
    """Print every value and where it came from, and the plan; start nothing."""
    setup = settled(set_up(resolved))
    console.print(values_table(setup.resolved), markup=False)
    console.print()
    _show_plan(setup, console)


def start(resolved: Resolved, console: Console) -> int:
    """Start a new run; gives the exit code: 0, or 128 + the signal that stopped it."""
    setup = set_up(resolved)
    ready = _ready(setup, console)
    store = _store(ready.setup)
    with store:
        if store.steps():
            raise OutsizeError(
                f"output {store.directory} holds a run already (step {store.latest()}): go on with"
                f" {resume_command(store.directory)}, or choose another directory"
            )
        _write(store.directory / RUN, ready.setup.resolved.to_yaml())
        _write(store.directory / PLAN, to_yaml(replace(setup.plan, budget=None)))
        return _train(ready, store, None, console)


def resume(
    directory: Path,
    changes: Iterable[tuple[str, object, str]],
    on_damage: OnDamage,
    console: Console,
) -> int:
    """Go on with the run in `directory`; gives the exit code.

    changes: (key, value, origin) that differ from the run's own values. OutsizeError for a change
    that would give other numbers, and for a run that is not there.
    """
    recorded = recorded_values(directory)
    resolved = _changed(recorded, changes, directory)
    store = Checkpoints(directory, resolved.get("train.keep"))
    with store:
        try:
            found = None if store.latest() is None else store.load(on_damage=on_damage)
            return _go_on(store, found, recorded, resolved, console)
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
) -> int:
    directory, model = store.directory, None
    if found is not None:
        for passed in found.passed_over:
            console.print(f"passed over: {passed}", markup=False, soft_wrap=True)
        same_run(found, resolved)
        if place_of(found).step >= resolved.get("train.steps"):
            console.print(_finished(found, directory), markup=False, soft_wrap=True)
            return 0
        model = subject_of(found.path, resolved.get("data.tokenizer"))
    _tell_threads(recorded, resolved, console)
    setup = set_up(resolved, from_yaml(_read(directory / PLAN)), model)
    ready = _ready(setup, console)
    _write(directory / RUN, ready.setup.resolved.to_yaml())
    _write(directory / PLAN, to_yaml(replace(setup.plan, budget=None)))
    return _train(ready, store, found, console)


def recorded_values(directory: Path) -> Resolved:
    """What the run in `directory` was started with. OutsizeError if there is none."""
    path = directory / RUN
    if not path.is_file():
        raise OutsizeError(
            f"no run in {directory}: {RUN} is missing; expected the output directory of a run"
        )
    return apply_text(Resolved(), _read(path), str(path)).with_value(
        "output", str(directory), "--resume"
    )


def _changed(
    recorded: Resolved, changes: Iterable[tuple[str, object, str]], directory: Path
) -> Resolved:
    resolved = recorded
    for name, value, origin in changes:
        if name == "output" or value == recorded.get(name):
            continue
        if name not in MAY_CHANGE:
            raise OutsizeError(
                f"{name} is {value!r} ({origin}), but the run in {directory} was started with"
                f" {recorded.get(name)!r}: set it back, or start a new run in another directory"
            )
        resolved = resolved.with_value(name, value, origin)
    return resolved


def _finished(found: Checkpoint, directory: Path) -> str:
    return (
        f"the run in {directory} is finished: step {found.step} of {place_of(found).steps}; nothing"
        " to do (--set train.steps=... goes on for longer)"
    )


def _tell_threads(recorded: Resolved, resolved: Resolved, console: Console) -> None:
    then, now = recorded.get("threads"), resolved.get("threads")
    if then != now:
        console.print(
            f"threads: {now}, where the run had {then}: sums are taken in another order, so the"
            " numbers may differ in their last bits",
            markup=False,
        )


def _store(setup: Setup) -> Checkpoints:
    assert setup.config.output is not None
    return Checkpoints(setup.config.output, setup.config.train.keep)


def _show_plan(setup: Setup, console: Console) -> None:
    console.print(plan_table(setup.forecast), markup=False)
    console.print()
    console.print(bytes_table(setup.forecast), markup=False)
    console.print()
    line = f"{foretold(setup.forecast)}; {setup.config.train.steps} steps"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"output: {setup.config.output}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Ready:
    """A run that is about to start: its times calibrated on its own data."""

    setup: Setup
    data: Data
    stream: TrainStream


def _ready(setup: Setup, console: Console) -> Ready:
    data = _data(setup, console)
    keys = setup.config.train
    assert keys.sequence is not None
    stream = TrainStream(data.train, keys.seed, setup.plan.rows, keys.sequence)
    with console.status("foretelling the time of a step"):
        setup = settled(calibrated(setup, stream))
    _show_plan(setup, console)
    console.print(
        f"data: {data.train.documents:,} documents, {data.train.tokens:,} tokens; validation"
        f" {data.validation.documents:,} documents, {data.validation.tokens:,} tokens;"
        f" {data.skipped.summary()}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return Ready(setup, data, stream)


def _train(ready: Ready, store: Checkpoints, found: Checkpoint | None, console: Console) -> int:
    setup, data, stream = ready.setup, ready.data, ready.stream
    keys = setup.config.train
    assert keys.steps is not None
    place = Place(0, keys.steps, 0, stream.cursor(0))
    with Stop() as stop, opened(setup.tiers, setup.plan, setup.forecast.below) as stores:
        ledger = meter(setup.device, setup.plan.budget)
        job = _job(setup, found, ledger, stores)
        if found is not None:
            place = replace(restore(found, job), steps=keys.steps)
            assert stream.resume(place.cursor) == place.step
            console.print(f"going on from step {place.step} of {place.steps}", markup=False)
        saved = None if found is None else found.step
        measure = Measure(ledger, place.step, place.steps)
        with Metrics(store.directory, place.step) as metrics:
            loop = Loop(setup, data, job, store, metrics, measure, place, stream, saved)
            with closing(job):
                loop.run(console, stop)
                if not loop.place.finished:
                    _say_stopped(loop, console)
                    return stop.code
                _finish(loop, console)
    return 0


def _job(setup: Setup, found: Checkpoint | None, ledger: Meter, stores: Mapping[str, Store]) -> Job:
    """The job, its weights where they rest: drawn, of the model's directory, or of `found`."""
    config, plan, keys = setup.subject.config, setup.plan, setup.config
    # In the precision that the optimizer updates.
    dtype = getattr(torch, plan.precision.master or plan.precision.compute)
    model = shells(config, dtype, setup.device)
    if found is not None:
        fill = weights_of(found, config)
    elif keys.model.weights == "random":
        fill = initial_draw(model, keys.train.seed)
    else:
        assert setup.subject.directory is not None
        fill = hub_fill(setup.subject.directory, config)
    optimizer, clip = optimizer_of(keys), keys.train.clip
    flow = NativeFlow(model, plan)
    return Job(flow, plan, optimizer, clip=clip, ledger=ledger, stores=stores, fill=fill)


def _say_stopped(loop: Loop, console: Console) -> None:
    command = resume_command(loop.store.directory)
    text = f"stopped after step {loop.place.step} and saved; to go on:\n{command}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _finish(loop: Loop, console: Console) -> None:
    """The sample, and foretold against measured."""
    setup, directory = loop.setup, loop.store.directory
    _sample(setup, loop.job, directory, console)
    if not (loop.measure.times or loop.measure.slow):
        return
    loop.measure.write(directory, setup.forecast, setup.config.model.name)
    loop.metrics.write({"step": loop.place.step, **loop.measure.record(setup.forecast)})
    console.print()
    console.print(loop.measure.table(setup.forecast), markup=False)
    if loop.bits_per_byte is not None:
        console.print(f"validation: {loop.bits_per_byte:.3f} bits per byte", markup=False)
    console.print(f"checkpoint: {loop.store.path(loop.place.step)}", markup=False, soft_wrap=True)


def _sample(setup: Setup, job: Job, directory: Path, console: Console) -> None:
    own = setup.config.sample
    if not own.tokens:
        return
    sampling = Sampling(own.temperature, seed=setup.config.train.seed)
    text = sample(job, setup.subject.tokenizer, own.prompt, own.tokens, sampling)
    _write(directory / SAMPLE, text)
    console.rule("sample")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.rule()


def _data(setup: Setup, console: Console) -> Data:
    own = setup.config.data
    config = DataConfig(
        path=own.path,
        kind=own.kind,
        field=own.field,
        tokenizer=setup.subject.text,
        validation=own.validation,
        cache=own.cache,
    )
    with console.status("reading data") as status:
        return open_data(
            config,
            setup.subject.config.vocab,
            lambda done, total: status.update(f"reading data: {done / max(total, 1):.0%}"),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutsizeError(f"{path} cannot be read: {error}") from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all, under its name in one step."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        raise OutsizeError(f"cannot write {path}: {error.strerror}") from error
