"""`outsize verify`: a plan against plain PyTorch, parameter by parameter, on any machine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import Command, refuse_unused
from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from rich.console import Console

    from outsize.verify.many import Outcome
    from outsize.verify.target import Wanted
    from outsize.verify.verify import Verdict

DRAWN_WORKERS = 8
PRECISIONS = ("float64", "float32", "bfloat16")
STEPS = 3
SERVED = 20  # draws of --serve where nobody says how many
TOLD = 20  # draws from line to line where there is no terminal
_NOT_OF_DRAWS = (
    "target", "mesh", "zero", "shards", "sequence_parallel", "sets", "steps", "resume"
)  # fmt: skip
_NOT_OF_RUNS = (
    "target", "workers", "mesh", "zero", "shards", "sequence_parallel", "sets", "resume",
    "processes", "seed", "precision",
)  # fmt: skip
_NOT_OF_SERVING = (
    "workers", "mesh", "zero", "shards", "sequence_parallel", "sets", "steps", "resume",
    "processes", "device",
)  # fmt: skip
_NOT_OF_TOKENS = (
    "zero", "shards", "sequence_parallel", "sets", "steps", "resume", "count", "precision",
    "processes", "serve",
)  # fmt: skip


@click.command(cls=Command)
@click.argument("target", required=False)
@click.option("--workers", type=click.IntRange(1), help="Workers; of draws: at most so many.")
@click.option("--mesh", metavar="AXES", help="Workers on each axis, as data=2,tensor=2.")
@click.option("--zero", type=click.IntRange(0, 3), help="What the data axis cuts, as plan.zero.")
@click.option("--shards", metavar="P,G,O", help="Instead of --zero: three numbers.")
@click.option("--sequence-parallel", is_flag=True, help="Cut tokens over the tensor axis.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a run's key.")
@click.option("--steps", type=click.IntRange(1), help="3; of --run: those it made, 20 at most.")
@click.option("--resume", is_flag=True, help="Go on from saved states before the last step.")
@click.option("--device", default="auto", metavar="KIND", help="Of the plan: auto, cpu or another.")
@click.option("--processes", is_flag=True, help="Workers as processes instead of threads.")
@click.option("--run", type=click.Path(path_type=Path), help="Replay the run of a directory.")
@click.option("--from", "start", type=click.IntRange(0), help="Of --run: begin at a checkpoint.")
@click.option("--generate", "tokens", type=click.IntRange(1), help="Generate so many instead.")
@click.option("--memory", metavar="SIZE", help="Of --generate: weights beyond it stay in files.")
@click.option("--overlap", type=click.IntRange(0), help="Of --generate, as outsize generate.")
@click.option("--serve", is_flag=True, help="Serve draws against each request alone instead.")
@click.option("--random", "count", type=click.IntRange(1), help="Verify so many random draws.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the first draw.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of all random draws.")
@click.option("--json", "as_json", is_flag=True, help="The whole verdict as JSON.")
@click.pass_context
def verify(
    ctx: click.Context,
    target: str | None,
    workers: int | None,
    mesh: str | None,
    zero: int | None,
    shards: str | None,
    sequence_parallel: bool,
    sets: tuple[str, ...],
    steps: int | None,
    resume: bool,
    device: str,
    processes: bool,
    run: Path | None,
    start: int | None,
    tokens: int | None,
    memory: str | None,
    overlap: int | None,
    serve: bool,
    count: int | None,
    seed: int,
    precision: str | None,
    as_json: bool,
) -> None:
    """Train a few steps under a plan and in plain PyTorch, and compare: gradients, weights, loss.

    TARGET is a run's file (YAML), a run's or a model's directory, a preset, or import.path:factory;
    without it a small model. Or replay the steps of a run that has been (--run), or generate with a
    model's directory and compare each token (--generate), or serve it in drawn settings, where each
    request must be told what it is told alone (--serve). Exit code 1 where float64 differs by more
    than 1e-10, or the run's own precision by more than rounding explains.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from outsize.screen import console
    from outsize.train.resolve import as_sets
    from outsize.verify.target import wanted

    if run is not None:
        unused = (*_NOT_OF_RUNS, "count", "tokens", "memory", "overlap", "serve")
        refuse_unused(ctx, unused, f"--run {run}, which is as it was")
        ctx.exit(_replay(run, start, steps, as_json, console()))
    refuse_unused(ctx, ("start",), without="--run")
    if tokens is not None:
        refuse_unused(ctx, _NOT_OF_TOKENS, f"--generate {tokens}, which trains nothing")
        spread = Spread(workers, mesh, memory, overlap, device)
        ctx.exit(_generate(target, tokens, spread, seed, as_json, console()))
    refuse_unused(ctx, ("memory", "overlap"), without="--generate")
    if serve or count is not None:
        asked = Asked(count or SERVED, seed, workers or DRAWN_WORKERS, precision, processes, device)
        drawn = "--serve" if serve else f"--random {count}"
        barred: tuple[str, ...] = _NOT_OF_SERVING if serve else _NOT_OF_DRAWS
        refuse_unused(ctx, barred, f"{drawn}, which draws all of that")
        ctx.exit(_served(target, asked, as_json) if serve else _random(asked, as_json))
    refuse_unused(ctx, ("seed", "precision"), without="--random")
    cut = _cut(zero, shards, sequence_parallel)
    given = (*sets, *as_sets({"workers": workers, "mesh": mesh, **cut}))
    verdict = _verdict(wanted(target, given, steps or STEPS, resume, device), processes)
    if isinstance(verdict, int):
        ctx.exit(verdict)
    _print(verdict, as_json, console())
    ctx.exit(0 if verdict.holds else 1)


def _cut(zero: int | None, shards: str | None, sequence_parallel: bool) -> dict[str, object]:
    """What is cut over the axes, by key of a run."""
    if zero is not None and shards is not None:
        raise OutsizeError(
            f"--zero {zero} and --shards {shards} both say what is cut; give one of them"
        )
    degrees = zero if shards is None else _degrees(shards)
    return {"plan.zero": degrees, "plan.sequence_parallel": sequence_parallel or None}


def _degrees(text: str) -> list[int]:
    """Three numbers, as "1,2,4"."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 3 or not all(word.isdecimal() for word in words):
        raise OutsizeError(
            f"--shards {text!r}; expected three numbers (parameters, gradients, optimizer), as"
            " 1,2,4"
        )
    return [int(word) for word in words]


def _verdict(wanted: Wanted, processes: bool) -> Verdict | int:
    import torch

    from outsize.verify import verify as threads
    from outsize.verify.target import case_of
    from outsize.verify.workers import in_processes

    if processes and wanted.mesh.size > 1:
        return in_processes(wanted.mesh, lambda: case_of(wanted), device=wanted.device)
    case = case_of(wanted)
    torch.set_num_threads(1)  # workers share the cores as threads
    return threads(case)


def _print(verdict: Verdict, as_json: bool, out: Console) -> None:
    from outsize.screen import say
    from outsize.screen import show as shown
    from outsize.verify import show

    if as_json:
        click.echo(json.dumps(show.as_json(verdict), indent=2))
        return
    shown(out, show.parameters(verdict.exact, verdict.limit), show.steps(verdict.exact))
    say(out, *show.lines(verdict))


def _replay(
    directory: Path, start: int | None, count: int | None, as_json: bool, out: Console
) -> int:
    """Replay a run; gives the exit code."""
    from outsize.screen import say
    from outsize.screen import show as shown
    from outsize.verify import show
    from outsize.verify.replay import replay

    found = replay(directory, start, count)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        shown(out, show.replayed(found))
        say(out, show.replayed_line(found))
    return 0 if found.holds else 1


@dataclass(frozen=True)
class Spread:
    """What a model that generates lies on, as `outsize generate` takes it."""

    workers: int | None
    mesh: str | None
    memory: str | None
    overlap: int | None
    device: str


def _generate(
    target: str | None, tokens: int, on: Spread, seed: int, as_json: bool, out: Console
) -> int:
    """Generate with a model's directory; gives the exit code."""
    import torch

    from outsize.memory.sizes import parse_bytes
    from outsize.plan.settings import NONE
    from outsize.screen import say
    from outsize.screen import show as shown
    from outsize.serve import workers
    from outsize.serve.files import Limits
    from outsize.verify import generated, show

    if target is None:
        raise OutsizeError("--generate: no directory; expected that of a model or a run")
    limits = None if on.memory is None else Limits(parse_bytes(on.memory))
    settings = NONE.having({"overlap": on.overlap})
    spread = workers.Asked(on.mesh, on.workers, {}, limits, settings, on.device)
    spread.check()
    torch.set_num_threads(1)
    mesh = spread.mesh_of()
    asked = generated.Asked(Path(target), tokens, mesh, limits, settings, on.device, seed)
    found = generated.spoken(asked)
    if as_json:
        said = {**dataclasses.asdict(found), "holds": found.holds}
        said["bounds"] = None if found.bounds is None else found.bounds.runs
        click.echo(json.dumps(said | {"over": [str(one) for one in found.over]}, indent=2))
    else:
        shown(out, show.spoken(found))
        say(out, *show.spoken_lines(found))
    return 0 if found.holds else 1


@dataclass(frozen=True)
class Asked:
    """Random draws, as they are asked for."""

    count: int
    seed: int
    workers: int
    precision: str | None
    processes: bool
    device: str

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.count)


def _served(target: str | None, asked: Asked, as_json: bool) -> int:
    """Serve draws; gives the exit code."""
    import torch

    from outsize.verify import draw_served, served

    torch.set_num_threads(1)
    subject = draw_served.subject_of(target)
    again = partial(served.command, target=target, precision=asked.precision)
    every = served.outcomes(asked.seeds, subject, asked.precision)
    return _told(every, asked.count, again, as_json, draw_served.features)


def _random(asked: Asked, as_json: bool) -> int:
    """Verify draws; gives the exit code."""
    import torch

    from outsize.verify import many
    from outsize.verify.workers import judge

    workers, processes, precision = asked.workers, asked.processes, asked.precision
    if not processes:
        torch.set_num_threads(1)
    again = partial(
        many.command, workers=workers, processes=processes, precision=precision,
        device=asked.device,
    )  # fmt: skip
    judged_by = judge if processes else None
    every = many.outcomes(asked.seeds, workers, judged_by, precision, asked.device)
    return _told(every, asked.count, again, as_json)


def _told(
    every: Iterable[Outcome],
    count: int,
    again: Callable[[Any], str],
    as_json: bool,
    named: Callable[[Any], Iterable[str]] | None = None,
) -> int:
    """Each as it comes: of one that does not hold what it is, and what repeats it; then all that
    there were, also where they are interrupted. Gives the exit code. named: what a draw has."""
    from outsize.screen import console, say

    found: list[Outcome] = []
    out = console()
    try:
        with out.status("", spinner_style="dim") as status:
            for one in every:
                found.append(one)
                so_far = f"{len(found)} of {count} draws"
                status.update(so_far)
                if not one.holds and not as_json:
                    say(out, f"{one.fault}\n  {one.drawn}\n  {again(one.drawn)}")
                if not (out.is_terminal or as_json) and len(found) % TOLD == 0:
                    say(out, so_far)  # for whoever reads the file that it goes to
    except KeyboardInterrupt:
        if found:
            _summed(found, again, as_json, named)
        raise
    return _summed(found, again, as_json, named)


def _summed(
    found: list[Outcome],
    again: Callable[[Any], str],
    as_json: bool,
    named: Callable[[Any], Iterable[str]] | None = None,
) -> int:
    """All in a line; gives the exit code. named: what a draw has."""
    from outsize.screen import console, say
    from outsize.verify import many, show

    total = many.summary(found, named)
    if as_json:
        click.echo(json.dumps(show.draws_json(total, again), indent=2))
    else:
        say(console(), show.draws_line(total))
    return 1 if total.faults else 0
