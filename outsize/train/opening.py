"""A run that is about to start: its data, its times calibrated on them, what is printed of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from outsize.data import SOURCES, Data, Dataset, TrainStream, open_data
from outsize.errors import counted
from outsize.kernels import native
from outsize.launch import WorkerGroup
from outsize.screen import say, show
from outsize.techniques import epochs
from outsize.train.base import Base
from outsize.train.finetuning import findings
from outsize.train.history import corrected, noted
from outsize.train.recipe import data_config, stream_of
from outsize.train.resolve import DERIVED
from outsize.train.setup import Setup, settled
from outsize.train.show import bytes_table, pace, plan_table, predicted, turns_table
from outsize.train.state import Place
from outsize.train.timing import calibrated


def show_plan(setup: Setup, console: Console) -> None:
    """Print the plan of a run, and what is predicted of it."""
    show(console, plan_table(setup.forecast), bytes_table(setup.forecast))
    if setup.forecast.ranks:
        show(console, turns_table(setup.forecast))
    steps = setup.config.train.steps
    assert steps is not None
    paces = [pace(setup.paces)] if setup.paces else []
    line = f"{predicted(setup.forecast)}; {counted(steps, 'step')}"
    stays = Base(setup.subject, setup.config.output).said(setup.forecast.below)
    say(console, line, *stays, *paces, *findings(setup.resolved), f"output: {setup.config.output}")


def _marked(data: Data) -> str:
    """How many tokens are targets, where not all are."""
    if data.train.weights_N is None:
        return ""
    return f" ({data.train.targets / data.train.tokens:.1%} of them targets)"


@dataclass(frozen=True)
class Ready:
    """A run that is about to start: its times calibrated on its own data."""

    setup: Setup
    data: Data
    stream: TrainStream


def ready_of(
    setup: Setup, console: Console, worker_group: WorkerGroup, at: Place | None = None
) -> Ready:
    """at: where the run is that goes on."""
    data = data_of(setup, console, worker_group)
    stream = streamed(setup, data).stream
    setup = _long_enough(setup, stream, at)
    if setup.device.type == "cpu":  # before anything is timed, and memory full
        native.load_named("training")
        drawn = setup.plan.budget is not None and setup.config.sample.tokens
        if setup.plan.precision.invariant or drawn:
            native.load_serving(setup.plan.precision.compute)
    with console.status("predicting the time of a step"):
        setup = noted(setup, "rates")
        timed = calibrated(setup, stream, worker_group)
        if timed.forecast is not setup.forecast:
            timed = noted(timed, "blocks")
        setup = settled(corrected(timed))
    show_plan(setup, console)
    parts = (f"{_size(data.train)}{_marked(data)}", f"validation {_size(data.validation)}")
    say(console, *_found(setup), f"data: {'; '.join((*parts, data.skipped.summary()))}")
    say(console, *_shares(setup), *_holds_out_nothing(setup, data), *data.skipped.warnings())
    return Ready(setup, data, stream)


def read_length(setup: Setup, console: Console) -> Setup:
    """The same with the steps of its epochs, for which its data are read where that is needed."""
    if setup.config.technique(epochs.KEY) is None:
        return setup
    return _long_enough(setup, streamed(setup, data_of(setup, console, WorkerGroup())).stream)


def _long_enough(setup: Setup, stream: TrainStream, at: Place | None = None) -> Setup:
    """The same with the steps of its epochs, where that is how its length is said."""
    own = setup.config.technique(epochs.KEY)
    if own is None:
        return setup
    done, sample = (0, 0) if at is None else (at.step, stream.goes_on(at.cursor))
    steps = own.steps(stream, done, sample)
    return replace(setup, resolved=setup.resolved.derive("train.steps", *steps))


def _holds_out_nothing(setup: Setup, data: Data) -> Iterator[str]:
    """A line where a part of the documents is to be held out, and it has none."""
    part, count = setup.config.data.validation, data.train.documents
    if part and not data.validation.documents:
        would = (
            f"{min(0.5, math.ceil(300 / count) / 100):g} or so would, or" if count > 1 else "name"
        )
        yield (
            f"nothing is held out, and no validation made: data.validation: {part:g} of"
            f" {counted(count, 'document')} is none; {would} files in data.evaluation"
        )


def _shares(setup: Setup) -> Iterator[str]:
    own = data_config(setup.config, setup.subject.text)
    said = [f"{share:.1%} from {p}" for p, share in zip(own.paths(), own.shares(), strict=False)]
    if said:
        yield f"data: of the rows {', '.join(said)}"


def _found(setup: Setup) -> Iterator[str]:
    """What the run found out itself of its data."""
    for key in filter(setup.resolved.is_derived, SOURCES.names()):
        why = setup.resolved.origins[key].removeprefix(DERIVED)
        yield f"data: {why}, which {key} trains on as such; {key}: false reads them as text"


def _size(data: Dataset) -> str:
    return f"{counted(data.documents, 'document', ',')}, {counted(data.tokens, 'token', ',')}"


def streamed(setup: Setup, data: Data) -> Ready:
    return Ready(setup, data, stream_of(setup.config, data, setup.plan))


def data_of(setup: Setup, console: Console, worker_group: WorkerGroup) -> Data:
    """The data of a run, which is the same for all workers."""
    worker_group.pulse.at("reading data")
    data = worker_group.in_turn("data", lambda: _opened(setup, console))
    parts = {"training data": data.train, "validation data": data.validation}
    prints = {name: part.fingerprint for name, part in parts.items()}
    worker_group.same("data", {"tokenizer": data.tokenizer.fingerprint(), **prints})
    return data


def _opened(setup: Setup, console: Console) -> Data:
    config = data_config(setup.config, setup.subject.text)
    with console.status("reading data") as status:
        return open_data(
            config,
            setup.subject.config.vocab,
            lambda done, total: status.update(f"reading data: {done / max(total, 1):.0%}"),
        )
