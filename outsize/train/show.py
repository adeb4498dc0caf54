"""A forecast as tables: bytes by kind and by segment, the peak, the time, the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from outsize.memory import KINDS, format_bytes
from outsize.plan import explain
from outsize.plan.plan import BYTES
from outsize.simulate import Forecast
from outsize.train.progress import duration
from outsize.train.resolve import Resolved

Segments = Sequence[tuple[str, Mapping[str, int]]]


def values_table(resolved: Resolved) -> Table:
    """Every key with its value and where that came from."""
    table = Table("key", "value", "from", "meaning", box=None, pad_edge=False)
    for name, value, origin, meaning in resolved.rows():
        table.add_row(name, value, origin, meaning)
    return table


def plan_table(forecast: Forecast) -> Table:
    """What the plan does."""
    table = Table("plan", "", "", box=None, pad_edge=False)
    for row in explain(forecast.plan):
        table.add_row(*row)
    table.add_row("schedule", _actions(forecast), "actions of a step")
    return table


def bytes_table(forecast: Forecast) -> Table:
    """Bytes by kind and by segment; blocks that are alike share a column."""
    groups = _grouped(forecast.segments)
    table = Table("bytes", *(name for name, _ in groups), "at the peak", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in _kinds(forecast):
        held = [segment.get(kind, 0) for _, segment in groups]
        table.add_row(kind, *map(_bytes, (*held, forecast.peak_by_kind.get(kind, 0))))
    return table


def foretold(forecast: Forecast) -> str:
    """One line: size, peak and time."""
    plan = forecast.plan
    count = forecast.static["parameters"] // BYTES[plan.precision.compute]
    speed = ""
    if plan.sequence:
        speed = f" ({plan.rows * plan.sequence / forecast.seconds:,.0f} tokens/s)"
    budget = "" if plan.budget is None else f", of a budget of {format_bytes(plan.budget)}"
    return (
        f"foretold: {count:,} parameters; peak memory {format_bytes(forecast.peak)}{budget};"
        f" a step {time_of(forecast.seconds)}{speed}"
    )


def time_of(seconds: float) -> str:
    """ "12.3 ms", "1.23 s", "4 min 05 s"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def as_json(forecast: Forecast) -> dict[str, Any]:
    """The same figures for programs: bytes and seconds."""
    return {
        "peak": forecast.peak,
        "peak_by_kind": dict(forecast.peak_by_kind),
        "static": dict(forecast.static),
        "segments": [{"name": name, "bytes": dict(held)} for name, held in forecast.segments],
        "step_seconds": forecast.seconds,
        "flops": forecast.flops,
        "microbatches": forecast.plan.microbatches,
        "schedule": {kind: count for kind, count in _counts(forecast).items()},
    }


def _kinds(forecast: Forecast) -> list[str]:
    held = {kind for _, segment in forecast.segments for kind in segment}
    return [kind for kind in KINDS if kind in held or kind in forecast.peak_by_kind]


def _grouped(segments: Segments) -> list[tuple[str, Mapping[str, int]]]:
    """Segments with the same bytes as one: "block 0 to 7, each"."""
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, (_, held) in enumerate(segments):
        alike.setdefault(tuple(sorted(held.items())), []).append(i)
    return [(_name(segments, places), segments[places[0]][1]) for places in alike.values()]


def _name(segments: Segments, places: list[int]) -> str:
    first, last = places[0], places[-1]
    name = segments[first][0]
    if first == last:
        return name
    if len(places) == last - first + 1:
        return f"{name} to {segments[last][0].rpartition(' ')[2]}, each"
    return f"{len(places)} like {name}, each"


def _counts(forecast: Forecast) -> Counter[str]:
    return Counter(action.kind.value for action in forecast.schedule.workers[0])


def _actions(forecast: Forecast) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _counts(forecast).items())


def _bytes(count: int) -> str:
    return format_bytes(count) if count else "-"
