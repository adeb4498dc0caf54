"""`outsize history`: foretold against measured, of the runs of this person on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outsize.cli.command import Light

if TYPE_CHECKING:
    from rich.table import Table

    from outsize.train.history import Entry


@click.command(cls=Light)
@click.option(
    "--last", type=click.IntRange(1), default=20, show_default=True, help="Lines to show."
)
@click.option("--clear", is_flag=True, help="Forget all: forecasts are corrected by none of it.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def history(last: int, clear: bool, as_json: bool) -> None:
    """What runs were foretold to hold and take, and what they did; later forecasts on the same
    machine are corrected by it."""
    import json

    from outsize import typed
    from outsize.errors import counted
    from outsize.screen import console, say, show
    from outsize.train import history as runs

    if clear:
        click.echo(f"{counted(runs.clear(), 'line')} of {runs.where()} forgotten")
        return
    entries, wrong = runs.read()
    if as_json:
        said = [typed.plain(entry) for entry in entries[-last:]]
        click.echo(json.dumps({"file": str(runs.where()), "runs": said, "unreadable": wrong}))
        return
    screen = console()
    if entries:
        show(screen, _table(entries[-last:]))
    say(screen, f"{counted(len(entries), 'forecast')} in {runs.where()}")
    if wrong:
        say(screen, f"{counted(wrong, 'line')} cannot be read and are left out")


def _table(entries: list[Entry]) -> Table:
    from outsize.memory import format_bytes
    from outsize.screen import table
    from outsize.train.show import time_of

    made = table(
        "run", "model", "mesh", "by", "step foretold", "measured", "off", "memory foretold",
        "measured", "off", "lanes", right=slice(4, 10),
    )  # fmt: skip
    for one in entries:
        (before, after), (held, had) = one.seconds, one.bytes
        lanes = ", ".join(f"{lane} {_off(*both)}" for lane, both in one.lanes.items())
        made.add_row(
            one.date, one.model, one.mesh, one.by, time_of(before), time_of(after),
            _off(before, after), format_bytes(held), format_bytes(had), _off(held, had), lanes,
        )  # fmt: skip
    return made


def _off(before: float, after: float) -> str:
    return f"{(after / before - 1) * 100:+.1f}%"
