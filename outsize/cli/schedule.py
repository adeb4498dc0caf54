"""`outsize schedule`: what a pipeline schedule takes and holds, drawn and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from outsize.schedule.pipelines import Pipeline, Shape
    from outsize.search.pipelines import Ranked
    from outsize.simulate.steps import Played, Times

COMPARE, AUTO = "compare", "auto"


@click.command()
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
    if name.endswith(".csv"):
        _refuse("a CSV", devices=devices, microbatches=microbatches)
        _refuse("a CSV", chunks=chunks, waves=waves, skip=skip, memory=memory)
        _one(_from_csv(Path(name)), seconds, as_json, html, to_csv)
        return
    shape = _shape(devices, microbatches, seconds, chunks, waves, skip)
    if name == COMPARE:
        _refuse(COMPARE, chunks=chunks, waves=waves, skip=skip, html=html, csv=to_csv)
        _compared(shape, seconds, memory, as_json)
        return
    if name == AUTO:
        from outsize.search.pipelines import automatic

        _refuse(AUTO, chunks=chunks, waves=waves, skip=skip)
        _show(automatic(shape, seconds, memory), as_json, html, to_csv)
        return
    from outsize.schedule.pipelines import make

    _refuse(f"{name!r}; `auto` and `compare` have it", memory=memory)
    _one(make(name, shape), seconds, as_json, html, to_csv)


def _times(text: str, transfer: float, both: float | None) -> Times:
    from outsize.errors import OutsizeError
    from outsize.simulate.steps import Times

    try:
        forward, of_input, of_weight = (float(word) for word in text.split(","))
    except ValueError:
        raise OutsizeError(
            f"--times: {text!r}; expected three numbers of seconds, as 1,1.2,0.8"
        ) from None
    return Times(forward, of_input, of_weight, transfer, both)


def _shape(
    devices: int | None, microbatches: int | None, times: Times,
    chunks: int | None, waves: int | None, skip: float | None,
) -> Shape:  # fmt: skip
    from outsize.errors import OutsizeError
    from outsize.schedule.pipelines import Costs, Shape

    for option, value in (("--devices", devices), ("--microbatches", microbatches)):
        if value is None:
            raise OutsizeError(f"{option}: missing; expected a number, as {option} 8")
    assert devices is not None and microbatches is not None
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer)
    return Shape(devices, microbatches, costs, chunks, waves, skip)


def _refuse(what: str, **options: object) -> None:
    """Options that would do nothing are errors."""
    from outsize.errors import OutsizeError

    for option, value in options.items():
        if value is not None:
            raise OutsizeError(
                f"--{option}: {value}; there is no such choice for {what}; leave it out"
            )


def _from_csv(path: Path) -> Pipeline:
    from outsize.errors import OutsizeError
    from outsize.schedule.csv import from_csv

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutsizeError(f"{path}: cannot read the schedule ({error})") from None
    return from_csv(text, path.name)


def _one(
    made: Pipeline, times: Times, as_json: bool, html: Path | None, to_csv: Path | None
) -> None:
    from outsize.schedule.prove import prove
    from outsize.simulate.steps import play

    prove(made.schedule, paths=made.paths)
    _show(play(made, times), as_json, html, to_csv)


def _show(played: Played, as_json: bool, html: Path | None, to_csv: Path | None) -> None:
    """Print the figures, and write what was asked for."""
    import json

    from outsize.cli.show import console
    from outsize.trace.text import write_text

    figures = _figures(played)
    if to_csv is not None:
        from outsize.schedule.csv import to_csv as as_csv

        write_text(as_csv(played.pipeline), to_csv)
    if html is not None:
        from outsize.report import write_timeline

        write_timeline(html, played.trace(), title=f"Schedule {played.pipeline.name}")
    if as_json:
        click.echo(json.dumps(figures, indent=2))
        return
    out = console()
    out.print(_table(played), markup=False)
    for line in _lines(figures):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _figures(played: Played) -> dict[str, Any]:
    """Seconds, and microbatches of a unit; lists have one entry a worker."""
    run, made = played.run, played.pipeline
    return {
        "schedule": made.name,
        "approximate": made.approximate,
        "devices": made.placement.workers,
        "microbatches": made.placement.microbatches,
        "stages": made.placement.stages,
        "makespan": _round(run.makespan),
        "max_idle_in_makespan": _round(max(run.idle_in_makespan)),
        "max_idle_in_rank_span": _round(max(run.idle_in_span)),
        "idle_in_makespan": [_round(idle) for idle in run.idle_in_makespan],
        "idle_in_rank_span": [_round(idle) for idle in run.idle_in_span],
        "peak_act_per_rank": [_round(peak) for peak in run.peaks],
    }


def _round(seconds: float) -> float:
    return round(seconds, 9) + 0.0  # no -0.0


def _lines(figures: dict[str, Any]) -> list[str]:
    share = figures["max_idle_in_makespan"] / figures["makespan"] if figures["makespan"] else 0.0
    lines = [
        f"{figures['schedule']}: {figures['devices']} devices, {figures['stages']} stages,"
        f" {figures['microbatches']} microbatches",
        f"makespan {figures['makespan']:g}, at most {figures['max_idle_in_makespan']:g} of it idle"
        f" ({share:.1%}); {figures['max_idle_in_rank_span']:g} within a worker's own span",
    ]
    if figures["approximate"]:
        lines.append(f"approximate: {figures['approximate']}")
    return lines


def _table(played: Played) -> Any:
    from rich.table import Table

    run, made = played.run, played.pipeline
    table = Table("worker", "stages", "busy", "idle", "idle in span", "peak activations")
    rows = zip(run.busy, run.idle_in_makespan, run.idle_in_span, run.peaks, strict=True)
    for worker, values in enumerate(rows):
        held = (s for s in range(made.placement.stages) if worker in made.placement.holders(s))
        table.add_row(str(worker), " ".join(map(str, held)), *(f"{_round(v):g}" for v in values))
    return table


def _compared(shape: Shape, times: Times, memory: float | None, as_json: bool) -> None:
    import json

    from rich.table import Table

    from outsize.cli.show import console
    from outsize.search.pipelines import compare

    ranked = compare(shape, times, memory)
    if as_json:
        click.echo(json.dumps([_ranked(one) for one in ranked], indent=2))
        return
    table = Table("schedule", "makespan", "idle", "peak activations", "why not")
    for one in ranked:
        row = _ranked(one)
        words = (
            "" if row[key] is None else f"{row[key]:g}" for key in ("makespan", "idle", "peak")
        )
        table.add_row(one.name, *words, one.why)
    console().print(table, markup=False)


def _ranked(one: Ranked) -> dict[str, Any]:
    if one.played is None:
        return {"schedule": one.name, "makespan": None, "idle": None, "peak": None, "why": one.why}
    return {
        "schedule": one.name,
        "makespan": _round(one.makespan),
        "idle": _round(max(one.played.run.idle_in_makespan)),
        "peak": _round(one.peak),
        "why": "",
    }
