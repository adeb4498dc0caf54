"""A run that is about to start: its data, its times calibrated on them, what is printed of them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from outsize.data import Data, DataConfig, TrainStream, open_data
from outsize.launch import Crew
from outsize.train.setup import Setup, settled
from outsize.train.show import bytes_table, foretold, pace, plan_table, turns_table
from outsize.train.timing import calibrated


def show_plan(setup: Setup, console: Console) -> None:
    console.print(plan_table(setup.forecast), markup=False)
    console.print()
    console.print(bytes_table(setup.forecast), markup=False)
    console.print()
    if setup.forecast.turns:
        console.print(turns_table(setup.forecast), markup=False)
        console.print()
    line = f"{foretold(setup.forecast)}; {setup.config.train.steps} steps"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if setup.paces:
        console.print(pace(setup.paces), markup=False, highlight=False, soft_wrap=True)
    console.print(f"output: {setup.config.output}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Ready:
    """A run that is about to start: its times calibrated on its own data."""

    setup: Setup
    data: Data
    stream: TrainStream


def ready_of(setup: Setup, console: Console, crew: Crew) -> Ready:
    data = data_of(setup, console, crew)
    stream = streamed(setup, data).stream
    with console.status("foretelling the time of a step"):
        setup = settled(calibrated(setup, stream, crew))
    show_plan(setup, console)
    console.print(
        f"data: {data.train.documents:,} documents, {data.train.tokens:,} tokens; validation"
        f" {data.validation.documents:,} documents, {data.validation.tokens:,} tokens;"
        f" {data.skipped.summary()}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return Ready(setup, data, stream)


def streamed(setup: Setup, data: Data) -> Ready:
    keys = setup.config.train
    assert keys.sequence is not None
    return Ready(setup, data, TrainStream(data.train, keys.seed, setup.plan.rows, keys.sequence))


def data_of(setup: Setup, console: Console, crew: Crew) -> Data:
    """The data of a run, which is the same for all workers."""
    crew.pulse.at("reading data")
    data = crew.in_turn("data", lambda: _opened(setup, console))
    parts = {"training data": data.train, "validation data": data.validation}
    prints = {name: part.fingerprint for name, part in parts.items()}
    crew.same("data", {"tokenizer": data.tokenizer.fingerprint(), **prints})
    return data


def _opened(setup: Setup, console: Console) -> Data:
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
