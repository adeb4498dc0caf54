"""`outsize train`: start a run, or go on with one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from outsize.cli.command import Command, placed, refuse_unused
from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from outsize.train.resolve import Resolved

# What a run has of which nothing is said: the best of those that benchmarks/recipe.py compares.
FIRST = ("data.tokenizer=bpe:2048", "optimizer.name=muon", "optimizer.lr=0.01")


@click.command(cls=Command)
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a key; repeatable.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with a run.")
@click.option(
    "--on-damage",
    type=click.Choice(["refuse", "previous"]),
    default="refuse",
    show_default=True,
    help="With --resume: what to do when the last checkpoint is damaged.",
)
@placed
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="Train under this plan, which `outsize plan --out` wrote.",
)
@click.option(
    "--calibrate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Correct this file of `outsize probe` by the run's steps, at its end.",
)
@click.option("--explain", is_flag=True, help="Print every value and its origin; start nothing.")
@click.pass_context
def train(
    ctx: click.Context,
    run: Path | None,
    sets: tuple[str, ...],
    resume: Path | None,
    on_damage: Literal["refuse", "previous"],
    places: Mapping[str, object],
    plan_file: str | None,
    calibrate: Path | None,
    explain: bool,
) -> None:
    """Train a model as the file RUN (YAML) says.

    Without a file and without --set, a small model learns from the text of Python's standard
    library, in at most two minutes on two cores.

    Workers of several machines are started by torchrun: torchrun ... -m outsize train RUN.
    """
    if resume is None:
        refuse_unused(ctx, ("on_damage",), without="--resume")
    else:
        refuse_unused(
            ctx, ("run", "plan_file"), f"--resume {resume}, whose values are those of that run"
        )
    # OpenMP reads it when PyTorch is loaded. Threads that spin while they wait keep the others of a
    # busy machine from running: a step of the default run took 135 to 2,300 ms beside one other
    # process on two cores, and 70 ms with threads that sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from outsize.screen import console
    from outsize.train.planned import with_plan
    from outsize.train.resolve import Resolved, as_sets, recorded_values, resolve

    if run is None and not sets and resume is None and plan_file is None:
        sets = FIRST

    def said() -> Resolved:
        return with_plan(resolve(run, (*sets, *as_sets({**places, "plan_file": plan_file}))))

    directory = None if resume is None else _run_directory(resume)
    if explain:
        refuse_unused(ctx, ("calibrate",), "--explain, which starts nothing")
        from outsize.train.run import explain as shown

        before = Resolved() if directory is None else recorded_values(directory)
        shown(before.under(said()), console())
        return
    from outsize.train.workers import run_workers

    if calibrate is None:
        ctx.exit(run_workers(said, directory, on_damage, console))
    ctx.exit(_calibrating(calibrate, said, directory, on_damage))


def _calibrating(
    path: Path,
    said: Callable[[], Resolved],
    directory: Path | None,
    on_damage: Literal["refuse", "previous"],
) -> int:
    """Run, then correct the file of hardware by what was measured."""
    from outsize.launch.hosts import started
    from outsize.screen import console, say
    from outsize.train.correcting import checked, correct
    from outsize.train.derive import output
    from outsize.train.workers import run_workers

    if started(os.environ):
        raise OutsizeError(
            f"--calibrate {path} corrects one machine's file; expected `outsize train --workers N`"
            " there, not workers of torchrun"
        )
    checked(path)
    values = output(said()) if directory is None else said()
    code = run_workers(lambda: values, directory, on_damage, console)
    if code == 0:
        say(console(), correct(path, Path(directory or values.get("output"))))
    return code


def _run_directory(path: Path) -> Path:
    """The run's own directory, if one of its checkpoints was given."""
    return path.parent if (path / "manifest.json").is_file() else path
