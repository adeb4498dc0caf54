"""`outsize schedule`: what a pipeline schedule takes and holds, drawn and compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Command
from outsize.cli.schedule_figures import compared, show
from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from outsize.schedule.ends import Ends
    from outsize.schedule.pipelines import Pipeline, Shape
    from outsize.schedule.pipelines.costs import EndCosts
    from outsize.simulate.coarse import Moving, Times

COMPARE, AUTO = "compare", "auto"
_NUMBERS = "numbers of seconds, as 1,1.2,0.8"


@click.command(cls=Command)
@click.argument("name")
@click.option("--devices", type=int, help="Workers of the pipeline.")
@click.option("--microbatches", type=int, help="Microbatches of a step.")
@click.option(
    "--chunks", type=int, help="Stages a worker, or passes of a V, where there is a choice."
)
@click.option("--waves", type=int, help="Waves of hanayo.")
@click.option("--skip", type=float, help="Part of the stages that skip-pipe leaves out.")
@click.option(
    "--times",
    default="1,1,1",
    show_default=True,
    metavar="F,I,W",
    help="Seconds of a worker's layers: forward, input gradient, weight gradient.",
)
@click.option("--comm-time", type=float, default=0.0, metavar="C", help="Seconds of a transfer.")
@click.option(
    "--overlapped",
    type=float,
    metavar="FB",
    help="Seconds of a forward and a backward that run as one; their sum where it is not given.",
)
@click.option(
    "--vocabulary",
    type=int,
    metavar="V",
    help="Cut the vocabulary layers over all workers: 1, with two barriers, or 2, with one.",
)
@click.option(
    "--vocabulary-times",
    metavar="F,I,W[,E,B]",
    help="Seconds of the whole output layer, and of the input layer forward and back. Without"
    " --vocabulary the last stage and the first have them.",
)
@click.option(
    "--offload",
    metavar="OUT,BACK[,BOTH]",
    help="Move activations to the host where that costs nothing: seconds of a microbatch of a"
    " worker's layers each way, and how many times longer while both ways are busy (1).",
)
@click.option(
    "--memory",
    type=float,
    metavar="N",
    help="Most microbatches of its layers that a worker may hold, for compare and auto.",
)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Draw the timeline into this file.")
@click.option(
    "--csv", "to_csv", type=click.Path(path_type=Path), help="Write PyTorch's pipelining CSV."
)
def schedule(
    name: str,
    devices: int | None,
    microbatches: int | None,
    chunks: int | None,
    waves: int | None,
    skip: float | None,
    times: str,
    comm_time: float,
    overlapped: float | None,
    vocabulary: int | None,
    vocabulary_times: str | None,
    offload: str | None,
    memory: float | None,
    as_json: bool,
    html: Path | None,
    to_csv: Path | None,
) -> None:
    """Simulate a pipeline schedule.

    NAME is a schedule, a file of PyTorch's pipelining CSV, "auto" for the shortest that the
    scheduler finds, or "compare" for all of them, the shortest first.
    """  # fmt: skip
    seconds = _times(times, comm_time, overlapped)
    moving = _moving(offload)
    ends, tables = _ends(vocabulary, vocabulary_times)
    if name.endswith(".csv"):
        _refuse("a CSV", devices=devices, microbatches=microbatches)
        _refuse("a CSV", chunks=chunks, waves=waves, skip=skip, memory=memory)
        made, priced = _cut(_from_csv(Path(name)), seconds, ends, tables)
        _one(made, priced, as_json, html, to_csv, moving)
        return
    if name in (COMPARE, AUTO):
        _refuse(name, offload=offload)
    shape = _shape(devices, microbatches, seconds, chunks, waves, skip)
    if name == COMPARE:
        _refuse(COMPARE, chunks=chunks, waves=waves, skip=skip, html=html, csv=to_csv)
        compared(shape, replace(seconds, ends=tables), memory, ends, as_json)
        return
    if name == AUTO:
        from outsize.search.pipeline_scheduler import automatic

        _refuse(AUTO, chunks=chunks, waves=waves, skip=skip)
        _refuse(AUTO, vocabulary=vocabulary, vocabulary_times=vocabulary_times)
        show(automatic(shape, seconds, memory), as_json, html, to_csv)
        return
    from outsize.schedule.pipelines import make

    _refuse(f"{name!r}; `auto` and `compare` have it", memory=memory)
    made, priced = _cut(make(name, shape), seconds, ends, tables)
    _one(made, priced, as_json, html, to_csv, moving)


def _times(text: str, transfer: float, both: float | None) -> Times:
    from outsize.simulate.coarse import Times

    forward, of_input, of_weight = _seconds("--times", text, (3,), f"three {_NUMBERS}")
    return Times(forward, of_input, of_weight, transfer, both)


def _seconds(option: str, text: str, counts: tuple[int, ...], wanted: str) -> list[float]:
    words = text.split(",")
    try:
        if len(words) in counts:
            return [float(word) for word in words]
    except ValueError:
        pass
    raise OutsizeError(f"{option}: {text!r}; expected {wanted}")


def _ends(variant: int | None, text: str | None) -> tuple[Ends | None, EndCosts | None]:
    """How the first and the last layer are cut, and their times."""
    from outsize.schedule.ends import named
    from outsize.schedule.pipelines.costs import EndCosts

    if variant is not None and text is None:
        raise OutsizeError(
            f"--vocabulary: {variant}, and no --vocabulary-times; expected the output layer's"
            " seconds, as --vocabulary-times 2,2,2"
        )
    ends = None if variant is None else named("vocabulary", variant)
    if text is None:
        return ends, None
    wanted = f"three or five {_NUMBERS}"
    return ends, EndCosts(*_seconds("--vocabulary-times", text, (3, 5), wanted))


def _cut(
    made: Pipeline, times: Times, ends: Ends | None, tables: EndCosts | None
) -> tuple[Pipeline, Times]:
    """The schedule with its ends cut where that is asked for, and all of its times."""
    from outsize.schedule.pipelines import Costs
    from outsize.schedule.pipelines.pipeline import with_ends

    if ends is not None and tables is not None:
        costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer)
        made = with_ends(made, ends, costs, tables)
    return made, replace(times, ends=tables)


def _shape(
    devices: int | None, microbatches: int | None, times: Times,
    chunks: int | None, waves: int | None, skip: float | None,
) -> Shape:  # fmt: skip
    from outsize.schedule.pipelines import Costs, Shape

    for option, value in (("--devices", devices), ("--microbatches", microbatches)):
        if value is None:
            raise OutsizeError(f"{option}: missing; expected a number, as {option} 8")
    assert devices is not None and microbatches is not None
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer)
    return Shape(devices, microbatches, costs, chunks, waves, skip)


def _refuse(what: str, **options: object) -> None:
    """Options that would do nothing are errors."""

    for option, value in options.items():
        if value is not None:
            name = option.replace("_", "-")
            raise OutsizeError(
                f"--{name}: {value}; there is no such choice for {what}; leave it out"
            )


def _from_csv(path: Path) -> Pipeline:
    from outsize.schedule.csv import from_csv
    from outsize.texts import read_text

    return from_csv(read_text(path), path.name)


def _moving(text: str | None) -> Moving | None:
    """What activations take to the host and back."""
    from outsize.simulate.coarse import Moving

    if text is None:
        return None
    wanted = (
        "seconds out and back, as 0.5,0.5, and how many times longer both take at once, as"
        " 0.5,0.5,2"
    )
    out, back, *both = _seconds("--offload", text, (2, 3), wanted)
    return Moving(out, back, *(both or (1.0,)))


def _one(
    made: Pipeline, times: Times, as_json: bool, html: Path | None, to_csv: Path | None,
    moving: Moving | None,
) -> None:  # fmt: skip
    from outsize.schedule.proof import prove
    from outsize.simulate.coarse import play

    prove(made.schedule, paths=made.paths)
    if moving is None:
        show(play(made, times), as_json, html, to_csv)
        return
    from outsize.search.pipeline_offload import spilled

    _refuse("a schedule with --offload, whose moves the format cannot say", csv=to_csv)
    found = spilled(made, times, moving)
    prove(found.made.pipeline.schedule, paths=made.paths)
    show(found.played, as_json, html, None, found)
