"""`outsize rehearse`: a plan for hardware that is not here, checked on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outsize.cli.command import Command
from outsize.errors import OutsizeError, counted

if TYPE_CHECKING:
    from outsize.hardware import Hardware
    from outsize.train.rehearsed import Rehearsed


@click.command(cls=Command)
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="A preset or a directory, instead of the plan's own.")
@click.option("--hardware", metavar="SPEC", help="Whose devices must hold it; else this machine.")
@click.option("--json", "as_json", is_flag=True, help="Bytes and counts as JSON.")
@click.pass_context
def rehearse(
    ctx: click.Context, plan_file: Path, model: str | None, hardware: str | None, as_json: bool
) -> None:
    """Make every distinct worker's list of a step of PLAN, prove all together, and play them on
    fake tensors under the ledger. Exit code 1 where a worker holds more than a device has."""
    import dataclasses
    import json

    from outsize.train.rehearsed import rehearsed

    machine = None if hardware is None else _machine(plan_file, hardware)
    made = rehearsed(plan_file, model, machine)
    room = None if machine is None else machine.devices[0].memory_bytes
    most = max(worker.played for worker in made.workers)
    fits = room is None or most <= room
    if as_json:
        said = {
            "mesh": str(made.plan.mesh),
            "proved": made.plan.mesh.size,
            "microbatches": made.plan.microbatches,
            "microbatches_played": made.microbatches,
            "step_seconds": made.seconds,
            "room": room,
            "fits": fits,
            "workers": [dataclasses.asdict(worker) for worker in made.workers],
        }
        click.echo(json.dumps(said, indent=2))
    else:
        _print(made, room)
    ctx.exit(0 if fits else 1)


def _machine(plan_file: Path, spec: str) -> Hardware:
    """The hardware of a SPEC. OutsizeError where it has fewer devices than the plan has workers."""
    from outsize.hardware import parse_spec
    from outsize.plan.file import read_plan

    cluster, workers = parse_spec(spec), read_plan(plan_file).plan.mesh.size
    if cluster.count < workers:
        has = counted(cluster.count, "device")
        raise OutsizeError(
            f"--hardware {spec!r} has {has}, and the plan in {plan_file} is for {workers} workers;"
            f" expected {workers} devices or more"
        )
    return cluster.hardware()


def _print(made: Rehearsed, room: int | None) -> None:
    from outsize.memory import format_bytes
    from outsize.screen import FIGURES, console, say, show, table

    out = console()
    rows = table("worker", "actions", "parameters", "peak, foretold", "peak, played", right=FIGURES)
    for place, worker in enumerate(made.workers):
        name = "every worker" if len(made.workers) == 1 else f"stage {place + 1}"
        held = (format_bytes(worker.foretold), format_bytes(worker.played))
        rows.add_row(name, f"{worker.actions:,}", f"{worker.parameters:,}", *held)
    show(out, rows)
    plan, most = made.plan, max(worker.played for worker in made.workers)
    lines = [
        f"proved: a step and an evaluation of {counted(plan.mesh.size, 'worker')} together",
        f"played on fake tensors: {made.microbatches} of {plan.microbatches} microbatches",
    ]
    if room is not None:
        missing = most - room
        lines.append(
            f"does not fit: {format_bytes(missing)} more than the {format_bytes(room)} of a device"
            if missing > 0
            else f"fits: {format_bytes(-missing)} less than the {format_bytes(room)} of a device,"
            " before what a process keeps beside tensors"
        )
    say(out, *lines)
