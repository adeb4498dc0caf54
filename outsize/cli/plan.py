"""`outsize plan`: what a run would hold and take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import Command, Drawing, drawing, placed, refuse_unused
from outsize.cli.elsewhere import Elsewhere, described
from outsize.cli.serving import NAMES, Serving, serving
from outsize.cli.serving import show as show_serving

if TYPE_CHECKING:
    from rich.console import Console

    from outsize.train.resolve import Resolved
    from outsize.train.setup import Setup


@click.command(cls=Command)
@click.argument("target", required=False)
@click.option("--model", metavar="NAME", help="A preset or a Hugging Face directory, as TARGET.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set a key; repeatable.")
@placed
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the plan there, for `outsize train --plan FILE`.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, 1 << 24),
    help="Predict `outsize generate` instead, for a prompt of so many tokens.",
)
@described
@drawing
@serving
@click.option("--json", "as_json", is_flag=True, help="Bytes and seconds as JSON.")
@click.pass_context
def plan(
    ctx: click.Context,
    target: str | None,
    model: str | None,
    sets: tuple[str, ...],
    places: Mapping[str, Any],
    out: Path | None,
    prompt_tokens: int | None,
    drawn: Drawing,
    served: Serving,
    elsewhere: Elsewhere,
    as_json: bool,
) -> None:
    """Predict a run: TARGET is its file (YAML), a preset, or a Hugging Face directory; or, with
    --prompt-tokens, what `outsize generate` holds and takes; with --serve, `outsize serve`; with
    --hardware, training or serving a published model or a config.json on a cluster that is not
    here."""
    from outsize.train.resolve import as_sets, is_file, values_of

    if model is not None and target is not None and not is_file(target):
        refuse_unused(ctx, ("target",), f"--model {model}, which is a model too")
    if elsewhere.hardware is not None and served.serve:
        from outsize.cli.served_elsewhere import show as show_there

        show_there(ctx, model or target, served, elsewhere, places, as_json)
        return
    if elsewhere.hardware is not None:
        refuse_unused(ctx, NAMES, "--hardware, which has no part of it")
        elsewhere.plan(ctx, model or target, sets, places, out, as_json)
        return
    elsewhere.refuse(ctx)
    draws = ("max_tokens", "temperature", "top_k", "top_p")
    if served.serve:
        lone = ("sets", "out", "tiers", "prompt_tokens")
        refuse_unused(ctx, (*lone, *draws), "--serve, which is of `outsize serve`")
        show_serving(model or target, served, places, as_json)
        return
    refuse_unused(ctx, NAMES, without="--serve")
    if prompt_tokens is not None:
        other = ("sets", "out", "host_memory", "disk", "tiers")
        refuse_unused(ctx, other, "--prompt-tokens, which is of `outsize generate`")
        _generation(model or target, prompt_tokens, drawn, places, as_json)
        return
    refuse_unused(ctx, draws, without="--prompt-tokens")
    _training(values_of(target, (*sets, *as_sets({"model.name": model, **places}))), out, as_json)


def _training(resolved: Resolved, out: Path | None, as_json: bool) -> None:
    """What a run that is trained here holds and takes."""
    import json

    from outsize.screen import console, say
    from outsize.screen import show as shown
    from outsize.train import show
    from outsize.train.base import Base
    from outsize.train.history import corrected, noted
    from outsize.train.setup import set_up
    from outsize.train.workers import over_workers

    setup = corrected(noted(set_up(over_workers(resolved), fit=False), "rates"))
    if out is not None:
        from outsize.plan.file import write_plan
        from outsize.train.planned import file_of

        write_plan(out, file_of(setup.plan, setup.config.model.name, setup.subject.config))
    if as_json:
        click.echo(json.dumps(show.as_json(setup.forecast), indent=2))
        return
    screen = console()
    tables = [show.plan_table(setup.forecast), show.bytes_table(setup.forecast)]
    if setup.forecast.ranks:
        tables.append(show.turns_table(setup.forecast))
    if setup.forecast.received:
        tables.append(show.network_table(setup.forecast))
    shown(screen, *tables)
    stays = Base(setup.subject, setup.config.output).said(setup.forecast.below)
    say(screen, show.predicted(setup.forecast), *stays, _fits(setup))
    if setup.tiers:
        _print_tiers(setup, screen)


def _generation(
    name: str | None, prompt: int, drawn: Drawing, places: Mapping[str, Any], as_json: bool
) -> None:
    """What going on from a prompt of so many tokens holds and takes."""
    import json

    from outsize.decode.generate import Request
    from outsize.memory import format_bytes, parse_bytes
    from outsize.screen import FIGURES, console, say, show, table
    from outsize.serve.forecast import described, forecast
    from outsize.serve.workers import Asked
    from outsize.train.resolve import is_file, values_of

    if name is None or is_file(name):
        name = str(values_of(name).get("model.name"))
    mesh, memory = Asked(places["mesh"], places["workers"], {}).mesh_of(), places["memory"]
    request = Request((0,) * prompt, drawn.max_tokens, drawn.sampling())
    made = forecast(described(name), request, mesh, memory and parse_bytes(memory))
    if as_json:
        spent = {f"{what}_seconds": each for what, each in made.seconds._asdict().items()}
        click.echo(json.dumps({**made.held, "read_by_token": made.read, **spent}, indent=2))
        return
    screen = console()
    rows = table("bytes", *(f"stage {i}" for i in range(mesh.pipeline)), right=FIGURES)
    for kind, sizes in made.held.items():
        rows.add_row(kind, *(format_bytes(size) if size else "-" for size in sizes))
    show(screen, rows)
    read = f"; {format_bytes(made.read)} read a token" if memory else ""
    token, first = made.seconds
    peaks = ", ".join(map(format_bytes, made.held["peak"]))
    say(
        screen,
        f"predicted: prompt {first:.3g} s; {token:.3g} s a token{read}; {peaks} at most",
    )


def _print_tiers(setup: Setup, out: Console) -> None:
    """What rests on the tiers, what techniques save, and the thresholds: of steps that are
    predicted from one microbatch."""
    from outsize.runtime.method import method_of
    from outsize.search import forecaster_of
    from outsize.search.thresholds import thresholds
    from outsize.search.tiers import states
    from outsize.search.tradeoffs import tradeoffs
    from outsize.train import show
    from outsize.train.setup import request_of

    made, config = setup.forecast, setup.subject.config
    if not method_of(made.plan.approximate).rehearsed:
        out.print()
        out.print(show.tiers_table(made, setup.tiers, setup.hardware), markup=False)
        return
    forecaster = forecaster_of(config, request_of(setup.resolved, setup.tiers), setup.hardware)
    limits = thresholds(made, states(forecaster.facts, made.plan), setup.tiers, setup.hardware)
    every = tradeoffs(forecaster, len(config.layers) + 2)
    tables = (
        show.tiers_table(made, setup.tiers, setup.hardware),
        show.savings_table(every),
        show.thresholds_table(limits, made.plan),
    )
    for table in tables:
        out.print()
        out.print(table, markup=False)


def _fits(setup: Setup) -> str:
    """Whether this machine's free memory holds it."""
    from outsize.memory import format_bytes

    free = setup.hardware.tier("device").bytes
    missing = setup.forecast.peak - free
    here = "here for each worker" if setup.plan.mesh.size > 1 else "here"
    if missing > 0:
        return (
            f"does not fit: {format_bytes(missing)} more than the {format_bytes(free)} free {here}"
        )
    return f"fits: {format_bytes(free)} free {here}"
