"""`outsize plan`: what a run would hold and take, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from outsize.train.setup import Setup


@click.command()
@click.argument("target", required=False)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a key; repeatable.")
@click.option("--memory", metavar="SIZE", help="Most memory on the device, as 2GiB.")
@click.option("--json", "as_json", is_flag=True, help="Bytes and seconds as JSON.")
def plan(target: str | None, sets: tuple[str, ...], memory: str | None, as_json: bool) -> None:
    """Foretell a run: TARGET is its file (YAML), a preset, or a Hugging Face directory."""
    import json

    from outsize.cli.show import console
    from outsize.train import show
    from outsize.train.resolve import resolve

    file, said = _target(target)
    said += sets if memory is None else (*sets, f"memory={memory}")
    resolved = resolve(file, said)
    from outsize.train.setup import set_up

    setup = set_up(resolved, fit=False)
    if as_json:
        click.echo(json.dumps(show.as_json(setup.forecast), indent=2))
        return
    out = console()
    for table in (show.plan_table(setup.forecast), show.bytes_table(setup.forecast)):
        out.print(table, markup=False)
        out.print()
    for line in (show.foretold(setup.forecast), _fits(setup)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _target(target: str | None) -> tuple[Path | None, tuple[str, ...]]:
    """(run file or None, what to set): a file is a run, anything else the name of a model."""
    if target is None:
        return None, ()
    path = Path(target)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return path, ()
    return None, (f"model.name={target}",)


def _fits(setup: Setup) -> str:
    """Whether this machine's free memory holds it."""
    from outsize.memory import format_bytes

    free = setup.hardware.tier("device").bytes
    missing = setup.forecast.peak - free
    if missing > 0:
        return f"does not fit: {format_bytes(missing)} more than the {format_bytes(free)} free here"
    return f"fits: {format_bytes(free)} free here"
