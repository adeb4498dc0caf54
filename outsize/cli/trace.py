"""`outsize trace`: what actions of a step took, beside what was predicted of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.errors import OutsizeError, counted

if TYPE_CHECKING:
    from outsize.trace import Difference, Event, Sum, Trace

PREDICTED, MEASURED = "predicted.json", "measured.json"  # in the directory of a run
SHOWN = 10  # actions of a table


@click.group()
def trace() -> None:
    """Look at the traces of steps."""


@trace.command()
@click.argument("first", metavar="RUN_DIR|PREDICTED", type=click.Path(path_type=Path))
@click.argument("second", metavar="[MEASURED]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--top", type=click.IntRange(min=1), help="Actions to name; 10, and with --json all of them."
)
@click.option(
    "--scaled",
    is_flag=True,
    help="Take off what all actions took longer: the forecast is stretched to the step's pace.",
)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON; seconds.")
@click.option("--html", type=click.Path(path_type=Path), help="Draw both into this page.")
@click.option("--perfetto", type=click.Path(path_type=Path), help="Write both for Perfetto.")
def diff(
    first: Path, second: Path | None, top: int | None, scaled: bool, as_json: bool,
    html: Path | None, perfetto: Path | None,
) -> None:  # fmt: skip
    """Name the actions that took longest beyond forecast.

    Of the run in RUN_DIR, or of a predicted trace and a measured one. The first may be a measured
    one too: then it is the forecast. Waiting for other workers is not counted.
    """
    found = _compared(*_both(first, second), scaled)
    if html is not None:
        from outsize.report import write_timeline

        write_timeline(
            html, found.predicted, found.measured, title=f"One step of {first.resolve().name}"
        )
    if perfetto is not None:
        from outsize.trace import write_perfetto

        write_perfetto(perfetto, found.predicted, found.measured)
    if as_json:
        click.echo(json.dumps(_figures(found, top), indent=2))
    else:
        _print(found, top or SHOWN)


@dataclass(frozen=True)
class _Compared:
    """Two traces action by action. seconds: of the step, as predicted; pace: how many times longer
    than that actions took; predicted: stretched to it where that was asked for."""

    seconds: float
    predicted: Trace
    measured: Trace
    found: Sequence[Difference]
    pace: float
    only_predicted: Sequence[Event]
    only_measured: Sequence[Event]

    def kinds(self) -> list[Sum]:
        from outsize.trace import sums

        return sums(self.found, lambda one: one.measured.kind)

    def workers(self) -> list[Sum]:
        from outsize.trace import sums

        return sums(self.found, lambda one: str(one.measured.worker))


def _both(first: Path, second: Path | None) -> tuple[Trace, Trace]:
    """The traces that were named."""
    from outsize.trace import read

    if second is None:
        if not first.is_dir():
            raise OutsizeError(
                f"{first}: no directory of a run; expected one, or the files of two traces"
            )
        for name in (PREDICTED, MEASURED):
            if not (first / name).is_file():
                raise OutsizeError(
                    f"{first}: {name} is missing; expected the directory of a run that has come to"
                    " its end"
                )
        first, second = first / PREDICTED, first / MEASURED
    before, now = read(first), read(second)
    if (before.source, now.source) == ("measured", "predicted"):
        raise OutsizeError(
            f"{first} is measured and {second} predicted; name the predicted one first"
        )
    return replace(before, source="predicted"), replace(now, source="measured")


def _compared(predicted: Trace, measured: Trace, scaled: bool) -> _Compared:
    from outsize.trace import alone, differences, pace_of, paced

    found = differences(predicted, measured)
    if not found:
        raise OutsizeError(
            f"the traces have no action in common ({_few(predicted)}; {_few(measured)}); expected"
            " those of one plan"
        )
    seconds, pace = predicted.span(), pace_of(found)
    if scaled:
        stretched = {"forecast": f"stretched {pace:.2f} times, to the pace of the step"}
        predicted = replace(paced(predicted, pace), meta={**predicted.meta, **stretched})
        found = differences(predicted, measured)
    return _Compared(seconds, predicted, measured, found, pace, *alone(predicted, measured))


def _few(of: Trace) -> str:
    names = ", ".join(event.name for event in of.events[:2])
    return f"{of.source}: {counted(len(of.events), 'action')}{f', {names}' if names else ''}"


# -- for programs ----------------------------------------------------------------------------------


def _figures(of: _Compared, top: int | None) -> dict[str, Any]:
    return {
        "predicted_seconds": of.seconds,
        "measured_seconds": of.measured.span(),
        "pace": of.pace,
        "matched": len(of.found),
        "only_predicted": len(of.only_predicted),
        "only_measured": len(of.only_measured),
        "actions": [_action(one) for one in of.found[:top]],
        "kinds": [{"kind": s.name, "count": s.count, **_took(s)} for s in of.kinds()],
        "workers": [{"worker": int(s.name), "count": s.count, **_took(s)} for s in of.workers()],
    }


def _action(one: Difference) -> dict[str, Any]:
    event = one.measured
    names = ("kind", "stage", "microbatch", "part")
    said = {name: getattr(event, name) for name in names}
    return {"worker": event.worker, "action": event.name, **said, **_took(one)}


def _took(one: Difference | Sum) -> dict[str, float]:
    return {
        "predicted": one.expected,
        "measured": one.took,
        "waited": one.waited,
        "beyond": one.beyond,
    }


# -- for people ------------------------------------------------------------------------------------


def _print(of: _Compared, top: int) -> None:
    from outsize.screen import FIGURES, console, say, table

    out = console()
    say(out, *_lines(of))
    late = [one for one in of.found[:top] if one.beyond > 0]
    rows = [[one.measured.name, str(one.measured.worker), *_seconds(one)] for one in late]
    for heads, body in (
        (("beyond forecast", "worker"), rows),
        (("kind", "actions"), [[s.name, str(s.count), *_seconds(s)] for s in of.kinds()]),
        (("worker", "actions"), [[s.name, str(s.count), *_seconds(s)] for s in of.workers()]),
    ):
        made = table(*heads, "predicted", "measured", "waited", "beyond", "", right=FIGURES)
        for row in body:
            made.add_row(*row)
        out.print()
        out.print(made, markup=False)


def _lines(of: _Compared) -> list[str]:
    from outsize.report import seconds
    from outsize.report.units import signed_percent

    before, now = of.seconds, of.measured.span()
    lines = [
        f"a step: {seconds(before)} predicted, {seconds(now)} measured"
        f" ({signed_percent(now, before)}); {len(of.found):,} actions in both,"
        f" at {of.pace:.2f} times their forecast",
    ]
    for name, events in (("predicted", of.only_predicted), ("measured", of.only_measured)):
        if events:
            kinds = Counter(event.kind for event in events)
            each = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
            lines.append(f"only {name}: {each}")
    return lines


def _seconds(one: Difference | Sum) -> list[str]:
    from outsize.report import seconds
    from outsize.report.units import signed_percent

    beyond = seconds(one.beyond).replace("-", "\N{MINUS SIGN}")
    return [
        seconds(one.expected),
        seconds(one.took),
        seconds(one.waited) if one.waited else "-",
        f"+{beyond}" if one.beyond > 0 else beyond,
        signed_percent(one.took, one.expected),
    ]
