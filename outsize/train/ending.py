"""The end of a run: the sample, and predicted against measured."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from outsize.decode.samplers import Sampling
from outsize.launch import WorkerGroup
from outsize.runtime.trains import Trains
from outsize.texts import write_text
from outsize.train.loop import Loop, resume_command
from outsize.train.sample import sample
from outsize.train.setup import Setup

SAMPLE = "sample.txt"


def say_stopped(loop: Loop, console: Console) -> None:
    command = resume_command(loop.store.directory)
    text = f"stopped after step {loop.place.step} and saved; to go on:\n{command}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def finish(loop: Loop, console: Console) -> None:
    """The sample, and predicted against measured."""
    setup, directory = loop.setup, loop.store.directory
    loop.worker_group.pulse.at("the sample")
    _sample(setup, loop.job, directory, console, loop.worker_group)
    if not (loop.measure.times or loop.measure.slow):
        return
    loop.worker_group.pulse.at("the trace")
    model, world = setup.config.model.name, loop.worker_group.world
    loop.measure.write(directory, setup.forecast, model, world, setup.device)
    loop.measure.agree(world, setup.device)
    loop.metrics.write({"step": loop.place.step, **loop.measure.record(setup.forecast)})
    console.print()
    console.print(loop.measure.table(setup.forecast), markup=False)
    if loop.bits_per_byte is not None:
        console.print(f"validation: {loop.bits_per_byte:.3f} bits per byte", markup=False)
    console.print(f"checkpoint: {loop.store.path(loop.place.step)}", markup=False, soft_wrap=True)


def _sample(
    setup: Setup, job: Trains, directory: Path, console: Console, worker_group: WorkerGroup
) -> None:
    own = setup.config.sample
    if not own.tokens:
        return
    sampling = Sampling(own.temperature, seed=setup.config.train.seed)
    text = sample(job, setup.subject.tokenizer, own.prompt, own.tokens, sampling)
    if worker_group.first:
        write_text(text, directory / SAMPLE)
    console.rule("sample")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.rule()
