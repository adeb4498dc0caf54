"""The end of a run: the sample, and predicted against measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from torch import Tensor

from outsize.data import Data, Tokenizer
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
PROMPT = "import "  # of a sample of text, where nobody says another
PATIENCE = 60.0  # seconds after which a sample ends whose every token reads weights from a tier


def say_stopped(loop: Loop, console: Console) -> None:
    command = resume_command(loop.store.directory)
    say(console, f"stopped after step {loop.place.step} and saved; to go on:\n{command}")


def finish(loop: Loop, console: Console) -> None:
    """The sample, and predicted against measured."""
    setup, directory = loop.setup, loop.store.directory
    loop.worker_group.pulse.at("the sample")
    _sample(setup, loop.job, loop.data, directory, console, loop.worker_group)
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
    setup: Setup, job: Job, data: Data, directory: Path, console: Console, worker_group: WorkerGroup
) -> None:
    own = setup.config.sample
    if not own.tokens:
        return
    sampling = Sampling(own.temperature, seed=setup.config.train.seed)
    text = sample(job, beginning(data, own.prompt), data.tokenizer, own.tokens, sampling)
    if worker_group.first:
        write_text(text, directory / SAMPLE)
    console.rule("sample")
    say(console, text)
    console.rule()


@dataclass(frozen=True)
class Beginning:
    """What a text begins with: ids, how they are shown, and the tokens that end it."""

    ids: list[int]
    shown: str
    ends: frozenset[int]


def beginning(data: Data, prompt: str | None) -> Beginning:
    """Of a sample. prompt None: of data where only answers count, what stands before the first
    answer of a document that is held out, or of the first there is."""
    tokenizer = data.tokenizer
    eos = frozenset((tokenizer.eos,))
    found = next((one for one in (data.validation, data.train) if one.documents), data.train)
    every = found.weights_N if prompt is None and found.whole else None
    weighed = np.empty(0, bool) if every is None else every[: found.ends[0]] > 0
    if not weighed.any():
        said = PROMPT if prompt is None else prompt
        return Beginning(prompt_ids(tokenizer, said), said, eos)
    first = int(weighed.argmax())  # above 0: the first token of a document is read alone
    after = first + int((~weighed[first:]).argmax() or len(weighed) - first)
    asked, last = found.tokens_N[:first].tolist(), int(found.tokens_N[after - 1])
    turn = frozenset() if tokenizer.decode([last]) else frozenset((last,))  # a special token
    return Beginning(asked, tokenizer.written(asked), eos | turn)


def sample(
    job: Job, begun: Beginning, tokenizer: Tokenizer, tokens: int, sampling: Sampling
) -> str:
    """The prompt and what follows it, as far as the model has positions. Where weights stream it
    ends early rather than late."""
    steps, config = job.tokens, job.tokens.model.config
    room = config.learned_positions - config.position_offset - config.virtual + 1
    if config.learned_positions:
        tokens = max(1, min(tokens, room - len(begun.ids)))
    check_request(steps.model, begun.ids, tokens)
    draw = hurried(sampling, tokenizer.eos) if job.placement.rooms else sampling
    request = Request(prompted(begun.ids, config.virtual), tokens, draw, begun.ends)
    drawn = (one.token for _, one in play([request], steps, steps.flow.device))
    said = pieces(drawn, tokenizer.stream(), StopStrings(()), begun.ends)
    return begun.shown + "".join(said)


def hurried(sampling: Sampling, end: int) -> Sampler:
    """A sampler that ends the text when time is up. One worker draws for all: they end together."""
    until = time.monotonic() + PATIENCE

    def draw(logits_V: Tensor, index: int) -> int:
        late = index > 0 and time.monotonic() > until
        return end if late else sampling(logits_V, index)

    return draw
