"""A forecast as tables: bytes by kind and by segment, the peak, the time, the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from outsize.hardware import Hardware
from outsize.memory import KINDS, format_bytes
from outsize.memory.disk import staging_bytes
from outsize.memory.tiers import TierSpec
from outsize.plan import Plan, explain
from outsize.screen import FIGURES, table
from outsize.search import Threshold, Tradeoff
from outsize.simulate import Forecast
from outsize.simulate.forecast import RankForecast, rate
from outsize.train.progress import duration
from outsize.train.resolve import Resolved

Segments = Sequence[tuple[str, Mapping[str, int]]]
_SHARED = {
    "borders": "rows of blocks that share them over the tensor axis, where these begin and end",
    "gather": "parameters that are cut, before they are used",
    "reduce": "gradients, summed",
    "collect": "parameters, from the workers that updated them",
    "merge": "gradients of stages that several workers of the pipeline have, summed",
    "stages": "activations and their gradients, between stages of the pipeline",
    "exchange": "embeddings, numbers of each token's softmax and gradients, of layers cut over all",
}


def values_table(resolved: Resolved) -> Table:
    """Every key with its value and where that came from."""
    made = table("key", "value", "from", "meaning")
    for name, value, origin, meaning in resolved.rows():
        made.add_row(name, value, origin, meaning)
    return made


def plan_table(forecast: Forecast) -> Table:
    """What the plan does."""
    made = table("plan", "", "")
    for row in explain(forecast.plan):
        made.add_row(*row)
    made.add_row("schedule", _actions(forecast), "actions of a step")
    for what, reason in forecast.why:
        made.add_row("chosen", what, reason)
    return made


def bytes_table(forecast: Forecast) -> Table:
    """Bytes by kind and by segment; blocks that are alike share a column."""
    groups = _grouped(forecast.segments)
    made = table("bytes", *(name for name, _ in groups), "at the peak", right=FIGURES)
    for kind in _kinds(forecast):
        held = [segment.get(kind, 0) for _, segment in groups]
        made.add_row(kind, *map(_bytes, (*held, forecast.peak_by_kind.get(kind, 0))))
    return made


def network_table(forecast: Forecast) -> Table:
    """What a worker has from others in a step, and what that takes."""
    made = table("from others", "of this machine", "of others", "takes", "", right=slice(1, 4))
    for name, part in forecast.received.items():
        bytes_ = (_bytes(round(count)) for count in (part.near, part.far))
        meaning = _SHARED.get(name, f"what the {name} axis says inside layers")
        made.add_row(name, *bytes_, time_of(part.seconds), meaning)
    return made


def turns_table(forecast: Forecast) -> Table:
    """What each worker of a pipeline holds, on tiers below too, and hears; workers of one place are
    alike."""
    tiers = tuple(forecast.below)
    made = table(
        "pipeline", "stages", "parameters", "always there", "peak", "from others",
        *(f"on {tier}" for tier in tiers), right=slice(2, None),
    )  # fmt: skip
    for place, turn in enumerate(forecast.ranks):
        heard = sum(part.total for part in turn.received.values())
        sizes = (sum(turn.static.values()), turn.peak, round(heard))
        made.add_row(
            str(place), runs_of(turn.stages), f"{turn.parameters:,}", *map(format_bytes, sizes),
            *(_bytes(turn.below.get(tier, 0)) for tier in tiers),
        )  # fmt: skip
    return made


def runs_of(numbers: Sequence[int]) -> str:
    """Rising numbers as runs: "0 to 2, 5"."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def tiers_table(forecast: Forecast, specs: Sequence[TierSpec], hardware: Hardware) -> Table:
    """What rests on each tier, at which rates, and what of it is RAM of this process beside the
    device's budget."""
    made = table("tier", "holds", "of", "reads", "writes", "RAM")
    on_cpu = not hardware.devices[0].apart
    for spec in specs:
        held = forecast.below.get(spec.name, 0)
        speeds = (f"{rate(hardware, spec.name, way) / 1e9:.2f} GB/s" for way in (True, False))
        made.add_row(
            spec.name, _bytes(held), format_bytes(spec.bytes), *speeds, _ram(spec, held, on_cpu)
        )
    return made


def _ram(spec: TierSpec, held: int, on_cpu: bool) -> str:
    """What a tier takes of RAM."""
    if not held:
        return "-"
    beside = "beside the budget" if on_cpu else "of the host"
    if spec.medium == "disk":
        return f"{format_bytes(staging_bytes(len(spec.paths)))} of staging {beside}"
    if not spec.paths:
        return f"{format_bytes(held)} {beside}"
    return f"{format_bytes(held)} mapped from {spec.paths[0]}"


def savings_table(every: Sequence[Tradeoff]) -> Table:
    """Each technique on top of those before: bytes saved on the device, and its cost in time."""
    made = table("techniques", "on the device", "saves", "below", "a step", "costs", right=FIGURES)
    for before, one in zip((None, *every), every, strict=False):
        saves, costs = "-", "-"
        if before is not None:
            saved, more = before.bytes - one.bytes, one.seconds / before.seconds - 1
            saves = format_bytes(saved) if saved >= 0 else f"-{format_bytes(-saved)}"
            costs = f"{more:+.1%}"
        made.add_row(
            one.technique, format_bytes(one.bytes), saves, _bytes(one.below),
            time_of(one.seconds), costs,
        )  # fmt: skip
    return made


def thresholds_table(limits: Sequence[Threshold], plan: Plan) -> Table:
    """From how many tokens on what streams is hidden, beside what the plan has."""
    made = table("hidden from", "tier", "tokens", "the plan has", "")
    for limit in limits:
        rows = plan.rows if limit.of == "step" else plan.microbatch_rows
        has = rows * plan.sequence
        name = limit.what if limit.hides else f"{limit.what}, a tenth of a step"
        says = "reached" if has >= limit.tokens else "not reached"
        needed = f"{limit.tokens:,.0f} a {limit.of}"
        made.add_row(name, limit.tier, needed, f"{has:,}", says)
    return made


def predicted(forecast: Forecast) -> str:
    """One line: size, peak and time."""
    plan = forecast.plan
    count = max((turn.parameters for turn in forecast.ranks), default=forecast.parameters)
    speed = ""
    if plan.sequence:
        speed = f" ({plan.rows * plan.sequence / forecast.mean:,.0f} tokens/s)"
    budget = "" if plan.budget is None else f", of a budget of {format_bytes(plan.budget)}"
    each = " of a worker" if plan.mesh.size > 1 else ""
    share, what = forecast.more
    more = f", on average {time_of(share * forecast.seconds)} more for {what}" if share else ""
    return (
        f"predicted: {count:,} parameters{each}; peak memory {format_bytes(forecast.peak)}{budget};"
        f" a step {time_of(forecast.seconds)}{more}{speed}"
    )


def pace(paces: Sequence[float]) -> str:
    """One line: how fast workers of a pipeline compute at once."""
    each = ", ".join(f"{count}: {pace:.2f}" for count, pace in enumerate(paces, start=1))
    return f"paces of workers that compute at once, by their number, alone being 1: {each}"


def time_of(seconds: float) -> str:
    """ "12.3 ms", "1.23 s", "4 min 05 s"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def as_json(forecast: Forecast) -> dict[str, Any]:
    """The same figures for programs: bytes and seconds."""
    return {
        **_held(forecast),
        "workers": [{"stages": list(turn.stages), **_held(turn)} for turn in forecast.ranks],
        "segments": [{"name": name, "bytes": dict(held)} for name, held in forecast.segments],
        "step_seconds": forecast.seconds,
        "mean_step_seconds": forecast.mean,
        "chosen": dict(forecast.why),
        "flops": forecast.flops,
        "microbatches": forecast.plan.microbatches,
        "schedule": dict(_counts(forecast)),
    }


def _held(of: Forecast | RankForecast) -> dict[str, Any]:
    received = {
        name: {
            "this_machine": round(part.near),
            "other_machines": round(part.far),
            "seconds": part.seconds,
        }
        for name, part in of.received.items()
    }
    return {
        "peak": of.peak,
        "peak_by_kind": dict(of.peak_by_kind),
        "static": dict(of.static),
        "below": dict(of.below),
        "received": received,
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
    return Counter(str(action.kind) for action in forecast.schedule.workers[0])


def _actions(forecast: Forecast) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _counts(forecast).items())


def _bytes(count: int) -> str:
    return format_bytes(count) if count else "-"
