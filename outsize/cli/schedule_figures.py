"""What `outsize schedule` prints: figures of a schedule, and schedules ranked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.errors import counted

if TYPE_CHECKING:
    from outsize.schedule.ends import Ends
    from outsize.schedule.pipelines import Shape
    from outsize.search.pipeline_offload import Spilling
    from outsize.search.pipeline_scheduler import Ranked
    from outsize.simulate.coarse import Played, Times


def show(
    played: Played, as_json: bool, html: Path | None, to_csv: Path | None,
    spilling: Spilling | None = None,
) -> None:  # fmt: skip
    """Print the figures, and write what was asked for. spilling: where activations leave."""
    import json

    from outsize.screen import console, say
    from outsize.texts import write_text

    figures = _figures(played)
    if spilling is not None:
        figures["offload"] = _offload(spilling)
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
    say(out, *_lines(figures))


def _figures(played: Played) -> dict[str, Any]:
    """Seconds, and microbatches of a unit; lists have one entry a worker."""
    run, made = played.run, played.pipeline
    return {
        "schedule": made.name,
        "approximate": made.approximate,
        "devices": made.placement.workers,
        "microbatches": made.placement.microbatches,
        "stages": made.placement.stages,
        "vocabulary": made.schedule.ends and made.schedule.ends.variant,
        "makespan": _round(run.makespan),
        "max_idle_in_makespan": _round(max(run.idle_in_makespan)),
        "max_idle_in_rank_span": _round(max(run.idle_in_span)),
        "idle_in_makespan": [_round(idle) for idle in run.idle_in_makespan],
        "idle_in_rank_span": [_round(idle) for idle in run.idle_in_span],
        "peak_act_per_rank": [_round(peak) for peak in run.peaks],
    }


def _offload(found: Spilling) -> dict[str, Any]:
    """What it is against keeping all activations: parts of a worker's that leave."""
    return {
        "moved": [_round(part) for part in found.moved],
        "peak_kept": [_round(peak) for peak in found.kept.run.peaks],
        "slower": _round(found.slower),
    }


def _round(seconds: float) -> float:
    return round(seconds, 9) + 0.0  # no -0.0


def _lines(figures: dict[str, Any]) -> list[str]:
    share = figures["max_idle_in_makespan"] / figures["makespan"] if figures["makespan"] else 0.0
    lines = [
        f"{figures['schedule']}: {counted(figures['devices'], 'device')},"
        f" {counted(figures['stages'], 'stage')},"
        f" {counted(figures['microbatches'], 'microbatch')}",
        f"makespan {figures['makespan']:g}, at most {figures['max_idle_in_makespan']:g} of it idle"
        f" ({share:.1%}); {figures['max_idle_in_rank_span']:g} within a worker's own span",
    ]
    if "offload" in figures:
        told = figures["offload"]
        lines.append(
            f"on the host {min(told['moved']):.0%} to {max(told['moved']):.0%} of a worker's"
            f" activations, for {told['slower']:.3f} times the makespan; peak"
            f" {max(figures['peak_act_per_rank']):g} instead of {max(told['peak_kept']):g}"
        )
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


def compared(
    shape: Shape, times: Times, memory: float | None, ends: Ends | None, as_json: bool
) -> None:
    """Print all schedules, the shortest first."""
    import json

    from rich.table import Table

    from outsize.screen import console
    from outsize.search.pipeline_scheduler import compare

    ranked = compare(shape, times, memory, ends)
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
