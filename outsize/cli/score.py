"""`outsize score`: how far forecasts are off published runs, by publication."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outsize.foresight.score import Report, Row, Score

HEADS = ("source", "rows", "timed", "error", "bias", "rank", "regret", "oom precision",
         "oom recall", "memory", "inside")  # fmt: skip


@click.command(cls=Command)
@click.argument("table", required=False, type=click.Path(path_type=Path))
@click.option(
    "--each-source-out",
    "each_out",
    is_flag=True,
    help="Take constants that were fitted without a row's own publication.",
)
@click.option(
    "--given",
    type=click.IntRange(1, 100),
    default=None,
    metavar="N",
    help="Correct each source's forecasts by N of its measured runs, which are not scored.",
)
@click.option("--forecasts", is_flag=True, help="Print every row's forecast, too.")
@click.option("--json", "as_json", is_flag=True, help="Scores and forecasts as JSON.")
@click.pass_context
def score(
    ctx: click.Context, table: Path | None, each_out: bool, given: int | None, forecasts: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Forecast the runs of TABLE (CSV, of training or of serving; the package's own of training
    where it is left out) and print how far off that is. Exit code 1 where a bar of accuracy is
    missed."""
    import json

    from outsize.foresight.runs import read_table, shipped
    from outsize.foresight.score import bars, report

    if table is not None and _of_serving(table):
        ctx.exit(_score_serving(table, given, forecasts, as_json))
    runs = list(shipped()) if table is None else read_table(table)
    made = report(runs, each_out, given or 0)
    missed = [bar for bar in bars(made) if bar.missed]
    if as_json:
        click.echo(json.dumps(_as_json(made, [bar.said() for bar in missed]), indent=2))
    else:
        _print(made, [bar.said() for bar in missed], forecasts)
    ctx.exit(1 if missed else 0)


def _of_serving(table: Path) -> bool:
    from outsize.serve.published import is_serving
    from outsize.texts import read_text

    return is_serving(read_text(table, "name a table of published runs"))


def _score_serving(table: Path, given: int | None, every: bool, as_json: bool) -> int:
    """Prints, and gives the exit code."""
    import json

    from outsize.cli.score_serving import as_json as made_json
    from outsize.cli.score_serving import printed
    from outsize.errors import OutsizeError
    from outsize.serve.published import forecasts, missed, read_file, score

    if given is not None:
        raise OutsizeError(f"--given {given}: forecasts of serving have no constant to correct")
    rows = read_file(table)
    made = forecasts(rows)
    if as_json:
        click.echo(json.dumps(made_json(rows, made), indent=2))
    else:
        printed(rows, made, every)
    return 1 if missed(score(made)) else 0


def _as_json(made: Report, missed: list[str]) -> dict[str, Any]:
    """Names as the issue has them; null where the table has nothing of the kind."""
    return {
        **_figures(made.whole),
        "sources": {name: _figures(found) for name, found in made.sources.items()},
        "unforecast": [
            {"line": run.line, "source": run.source.name, "model": run.model, "why": run.missing}
            for run in made.missing
        ],
        "given": [row.run.line for row in made.given],
        "missed": missed,
        "forecasts": [_forecast(row) for row in made.rows],
    }


def _figures(found: Score) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)


def _forecast(row: Row) -> dict[str, Any]:
    run = row.run
    assert run.layout is not None
    return {
        "line": run.line,
        "source": run.source.name,
        "model": run.model,
        "step_seconds": row.seconds,
        "low": row.low,
        "high": row.high,
        "tokens_per_s_per_device": row.rate,
        "bytes": row.memory.process,
        "fits": row.fits,
        "only_foretold": run.layout.foretold_only,
        "assumed": list(run.layout.assumed),
    }


def _print(made: Report, missed: list[str], forecasts: bool) -> None:
    from outsize.screen import FIGURES, console, say, show, table

    out = console()
    if forecasts or not any(row.measured for row in made.rows):
        _print_forecasts(made.rows, out)
    rows = table(*HEADS, right=FIGURES)
    for name, found in (*made.sources.items(), ("all", made.whole)):
        rows.add_row(name, *_cells(found))
    show(out, rows)
    if made.given:
        say(out, f"given, and not scored: {len(made.given)} rows")
    if made.missing:
        say(out, f"not forecast: {len(made.missing)} rows")
        for line in _reasons(made):
            say(out, f"  {line}")
    for line in missed:
        say(out, f"missed: {line}")


def _cells(found: Score) -> list[str]:
    def part(value: float | None, form: str = ".1%") -> str:
        return "-" if value is None else format(value, form)

    return [
        str(found.rows), str(found.timed), part(found.mape), part(found.bias, "+.1%"),
        part(found.rank, ".2f"), part(found.regret), part(found.oom_precision, ".3f"),
        part(found.oom_recall, ".3f"), part(found.memory_mape), part(found.inside, ".0%"),
    ]  # fmt: skip


def _print_forecasts(rows: Sequence[Row], out: Console) -> None:
    from outsize.memory import format_bytes
    from outsize.screen import show, table

    heads = ("line", "model", "device", "devices", "precision", "step", "from", "to",
             "tokens/s/device", "memory", "fits")  # fmt: skip
    made = table(*heads)
    for row in rows:
        run = row.run
        assert run.layout is not None
        only = " (foretold only)" if run.layout.foretold_only else ""
        made.add_row(
            str(run.line), run.model, run.device, str(run.layout.devices),
            run.layout.precision + only, f"{row.seconds:.4g} s", f"{row.low:.4g}",
            f"{row.high:.4g}", f"{row.rate:.5g}", format_bytes(int(row.memory.process)),
            "yes" if row.fits else "no",
        )  # fmt: skip
    show(out, made)


def _reasons(made: Report) -> list[str]:
    """Rows that cannot be forecast, by publication and reason."""
    from collections import Counter

    count = Counter((run.source.name, run.missing) for run in made.missing)
    return [f"{name}: {each} rows: {why}" for (name, why), each in count.items()]
