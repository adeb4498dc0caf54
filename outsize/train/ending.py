"""The end of a run: the sample, and predicted against measured."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from torch import Tensor

from outsize.data import Tokenizer
from outsize.decode.generate import Request, check_request, play
from outsize.decode.samplers import Sampler, Sampling
from outsize.decode.text import StopStrings, pieces, prompt_ids
from outsize.launch import WorkerGroup
from outsize.models.layout import prompted
from outsize.runtime.job import Job
from outsize.screen import say
from outsize.texts import write_text
from outsize.train import history
from outsize.train.finetuning import signs, tunes
from outsize.train.loop import Loop, resume_command
from outsize.train.metrics import read_metrics
from outsize.train.setup import Setup

SAMPLE = "sample.txt"
PATIENCE = 60.0  # seconds after which a sample ends whose every token reads weights from a tier


def say_stopped(loop: Loop, console: Console) -> None:
    command = resume_command(loop.store.directory)
    say(console, f"stopped after step {loop.place.step} and saved; to go on:\n{command}")


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
    if loop.worker_group.first:
        measure = loop.measure
        history.record(setup, measure.lanes, measure.seconds, measure.peak)
    console.print()
    console.print(loop.measure.table(setup.forecast), markup=False)
    if tunes(setup.resolved) and loop.worker_group.first:
        said = signs(read_metrics(directory), loop.place.step)
        say(console, *([said] if said else []))
    if loop.bits_per_byte is not None:
        say(console, f"validation: {loop.bits_per_byte:.3f} bits per byte")
    say(console, f"checkpoint: {loop.store.path(loop.place.step)}")


def _sample(
    setup: Setup, job: Job, directory: Path, console: Console, worker_group: WorkerGroup
) -> None:
    own = setup.config.sample
    if not own.tokens:
        return
    sampling = Sampling(own.temperature, seed=setup.config.train.seed)
    text = sample(job, setup.subject.tokenizer, own.prompt, own.tokens, sampling)
    if worker_group.first:
        write_text(text, directory / SAMPLE)
    console.rule("sample")
    say(console, text)
    console.rule()


def sample(job: Job, tokenizer: Tokenizer, prompt: str, tokens: int, sampling: Sampling) -> str:
    """The prompt and what follows it. Where weights stream it ends early rather than late."""
    ids, steps, ends = prompt_ids(tokenizer, prompt), job.tokens, frozenset((tokenizer.eos,))
    check_request(steps.model, ids, tokens)
    draw = hurried(sampling, tokenizer.eos) if job.placement.rooms else sampling
    request = Request(prompted(ids, steps.model.config.virtual), tokens, draw, ends)
    drawn = (one.token for _, one in play([request], steps, steps.flow.device))
    return prompt + "".join(pieces(drawn, tokenizer.stream(), StopStrings(()), ends))


def hurried(sampling: Sampling, end: int) -> Sampler:
    """A sampler that ends the text when time is up. One worker draws for all: they end together."""
    until = time.monotonic() + PATIENCE

    def draw(logits_V: Tensor, index: int) -> int:
        late = index > 0 and time.monotonic() > until
        return end if late else sampling(logits_V, index)

    return draw
