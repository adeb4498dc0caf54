"""What `outsize plan --hardware` prints of unlike devices: plans, and the workers of the best."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from outsize.cli.elsewhere_shown import cost_said
from outsize.foresight.planning.asked import Asked, value_of
from outsize.foresight.planning.uneven import Uneven
from outsize.foresight.planning.written import mesh_said


def show_unlike(
    name: str, asked: Asked, made: Sequence[Uneven], cost: Mapping[str, float], as_json: bool
) -> None:
    """Print plans, the best one first. cost: of the whole run, as far as it is known."""
    if as_json:
        plans = [_as_json(one) for one in made]
        said = {"model": name, "devices": made[0].layout.devices, "plans": plans, **cost}
        click.echo(json.dumps(said, indent=2))
    else:
        _print(made, asked, cost)


def _as_json(one: Uneven) -> dict[str, Any]:
    lay = one.layout
    return {
        "mesh": mesh_said(lay),
        "microbatch_rows": lay.rows,
        "microbatches": one.microbatches,
        "recompute": lay.recompute,
        "zero": value_of(lay, "zero"),
        "step_seconds": one.seconds,
        "low": one.low,
        "high": one.high,
        "tokens_per_s": lay.batch * lay.sequence / one.seconds,
        "mfu": one.mfu,
        "row_shares": one.shares,
        "workers" if lay.pipeline == 1 else "stages": [
            {"device": part.device, "count": part.count, "blocks": part.blocks, "rows": part.rows,
             "beat_seconds": part.beat, "bytes": part.memory.process, "room": part.room}
            for part in one.parts
        ],
    }  # fmt: skip


def _print(made: Sequence[Uneven], asked: Asked, cost: Mapping[str, float]) -> None:
    from outsize.memory import format_bytes
    from outsize.screen import FIGURES, console, say, show, table

    rows = table("mesh", "rows", "recompute", "zero", "step", "from", "to", "tokens/s", "MFU",
                 right=FIGURES)  # fmt: skip
    for one in made:
        lay = one.layout
        tokens = lay.batch * lay.sequence / one.seconds
        rows.add_row(
            mesh_said(lay), str(lay.rows), lay.recompute, str(value_of(lay, "zero")),
            f"{one.seconds:.3g} s", f"{one.low:.3g}", f"{one.high:.3g}", f"{tokens:,.0f}",
            f"{one.mfu:.1%}",
        )  # fmt: skip
    staged = made[0].layout.pipeline > 1
    parts = table("stage" if staged else "workers", "device", "blocks" if staged else "rows a step",
                  "seconds a microbatch", "memory", "of", right=slice(2, None))  # fmt: skip
    for place, part in enumerate(made[0].parts, start=1):
        held, room = format_bytes(int(part.memory.process)), format_bytes(part.room)
        first, has = (place, part.blocks) if staged else (part.count, part.rows)
        parts.add_row(str(first), part.device, str(has), f"{part.beat:.3g}", held, room)
    out = console()
    show(out, rows, parts)
    say(
        out,
        f"{asked.batch} rows of {asked.sequence} tokens a step;"
        f" {'blocks' if staged else 'rows'} by what the devices of each compute and hold",
    )
    if cost:
        say(out, cost_said(cost))
