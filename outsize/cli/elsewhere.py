"""`outsize plan --hardware`: options and what is printed of a plan on hardware that is not here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import refuse_unused
from outsize.errors import OutsizeError, nearest

if TYPE_CHECKING:
    from outsize.foresight.described import Asked, Choice, Planned
    from outsize.hardware import Cluster

SEQUENCE, TOKENS = 4096, 4 << 20  # of a row, and of a step, where nothing is said
KEYS = (
    "train.sequence", "train.batch_tokens", "plan.microbatch_rows", "plan.recompute", "plan.zero",
    "plan.pipeline", "precision",
)  # fmt: skip
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_OPTIONS = (
    click.option(
        "--hardware", metavar="SPEC", help="Plan for it, as '128 x 8 A100-SXM-80 @ 25GB/s'."
    ),
    click.option("--tokens", metavar="N", help="Tokens of the whole run, as 2T: days and hours."),
    click.option("--price", metavar="N/h", help="Of a device and hour, as 2.50/h."),
    click.option("--watts", type=float, help="Of a device in use, instead of the catalogue's."),
    click.option("--top", type=click.IntRange(1, 100), default=5, help="Plans to show; 5."),
)
_NAMES = ("hardware", "tokens", "price", "watts", "top")


def described(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command options of hardware that is not here, as `elsewhere`."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> None:
        own = {each.name: options.pop(each.name) for each in fields(Elsewhere)}
        command(*args, elsewhere=Elsewhere(**own), **options)

    for option in reversed(_OPTIONS):
        call = option(call)
    return call


@dataclass(frozen=True)
class Elsewhere:
    """What is asked of hardware that is not here."""

    hardware: str | None
    tokens: str | None
    price: str | None
    watts: float | None
    top: int

    def refuse(self, ctx: click.Context) -> None:
        """OutsizeError for options that say nothing without --hardware."""
        refuse_unused(ctx, _NAMES[1:], "no --hardware, which they go with")

    def plan(
        self, ctx: click.Context, name: str | None, sets: tuple[str, ...],
        places: Mapping[str, Any], as_json: bool,
    ) -> None:  # fmt: skip
        """Choose and print."""
        import json

        from outsize.foresight.described import choose
        from outsize.foresight.named import shape_of
        from outsize.hardware import parse_spec

        other = ("out", "prompt_tokens", "host_memory", "disk", "tiers", "workers", "max_tokens",
                 "temperature", "top_k", "top_p")  # fmt: skip
        refuse_unused(ctx, other, "--hardware, which has no part of it")
        if name is None:
            raise OutsizeError("no model; expected as `outsize plan llama3-70b --hardware SPEC`")
        cluster = parse_spec(self.hardware or "")
        asked = _asked(sets, places, cluster.count)
        made = choose(shape_of(name), asked, cluster, self.top)
        cost = self._cost(made.plans[0], cluster)
        if as_json:
            click.echo(json.dumps(_as_json(made, cost), indent=2))
        else:
            _print(made, asked, cluster, cost)

    def _cost(self, best: Planned, cluster: Cluster) -> dict[str, float]:
        """Days, device-hours, money and kWh of the whole run, as far as they are known."""
        price, watts = _price(self.price), self.watts
        if watts is not None and watts <= 0:
            raise OutsizeError(f"--watts is {watts}; expected more than 0")
        if self.tokens is None:
            return {}
        seconds = _count(self.tokens, "--tokens") / best.tokens * best.seconds
        hours = seconds / 3600 * best.layout.devices
        found = {"days": seconds / 86400, "device_hours": hours}
        device = cluster.groups[0].device
        price = price or (device.price.value if device.price else None)
        watts = watts or (device.watts.value if device.watts else None)
        if price is not None:
            found["money"] = price * hours
        if watts is not None:
            found["kwh"] = watts * hours / 1000
        return found


# -- what is asked ---------------------------------------------------------------------------------


def _asked(sets: tuple[str, ...], places: Mapping[str, Any], count: int) -> Asked:
    from outsize.foresight.described import Asked
    from outsize.memory import parse_bytes

    said = _values(sets)
    sequence = _count(said.get("train.sequence", SEQUENCE), "train.sequence")
    tokens = _count(said.get("train.batch_tokens", TOKENS), "train.batch_tokens")
    if tokens < sequence:
        raise OutsizeError(f"train.batch_tokens is {tokens}; expected {sequence} or more, a row")
    rows, zero = said.get("plan.microbatch_rows"), said.get("plan.zero")
    if zero not in (None, 0, 1, 3):
        raise OutsizeError(f"plan.zero is {zero!r}; --hardware forecasts 0, 1 and 3")
    return Asked(
        sequence,
        tokens // sequence,
        str(said.get("precision", "bf16")),
        _mesh(places["mesh"], count),
        None if rows is None else _count(rows, "plan.microbatch_rows"),
        _recompute(said.get("plan.recompute")),
        zero,
        _chunks(said.get("plan.pipeline")),
        parse_bytes(places["memory"]) if places["memory"] else None,
    )


def _values(sets: tuple[str, ...]) -> dict[str, Any]:
    """Of KEY=VALUE, each of a key that a forecast asks."""
    import yaml

    found: dict[str, Any] = {}
    for each in sets:
        key, equals, value = each.partition("=")
        if key not in KEYS or not equals:
            raise OutsizeError(f"--set {each}: beside --hardware expected{nearest(key, KEYS)}")
        found[key] = yaml.safe_load(value)
    return found


def _count(value: Any, what: str) -> int:
    """A number, as 4M or 2T too."""
    text = str(value).strip()
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        found = float(text[: len(text) - len(unit)]) * _COUNT[unit]
    except (ValueError, KeyError):
        raise OutsizeError(f"{what} is {text!r}; expected a number, as 4096, 4M or 2T") from None
    if not 1 <= found < 1e20:
        raise OutsizeError(f"{what} is {text!r}; expected 1 or more")
    return int(found)


def _price(text: str | None) -> float | None:
    if text is None:
        return None
    number, _, unit = text.partition("/")
    try:
        found = float(number)
    except ValueError:
        found = -1.0
    if unit.strip() != "h" or not 0 < found < 1e9:
        raise OutsizeError(f"--price is {text!r}; expected more than 0 an hour, as 2.50/h")
    return found


def _mesh(text: str | None, count: int) -> tuple[int, int, int, int] | None:
    """Workers that share weights, stages, tokens and experts; what is left is the data axis."""
    from outsize.collectives import parse_mesh
    from outsize.collectives.axes import axis_of

    if text is None:
        return None
    mesh, sizes = parse_mesh(text), dict.fromkeys(("rows", "tokens", "weights", "stages"), 1)
    experts = 1
    for name, size in mesh.sizes:
        if axis_of(name).parts:
            experts *= size
        else:
            sizes[axis_of(name).cuts] *= size
    if count % mesh.size or (sizes["rows"] > 1 and mesh.size != count):
        raise OutsizeError(
            f"mesh {text} has {mesh.size} workers, the hardware {count}; expected as many, or axes"
            " that divide them"
        )
    return sizes["weights"], sizes["stages"], sizes["tokens"], experts


def _recompute(value: Any) -> Any:
    if value is None:
        return None
    if value == []:
        return "none"
    if value == ["block"]:
        return "full"
    raise OutsizeError(f"plan.recompute is {value}; --hardware forecasts [] and [block]")


def _chunks(value: Any) -> int | None:
    if value is None:
        return None
    name, _, number = str(value).partition(":")
    if name == "1f1b" and not number:
        return 1
    if name == "interleaved" and number.isdecimal() and int(number) > 1:
        return int(number)
    raise OutsizeError(f"plan.pipeline is {value}; --hardware forecasts 1f1b and interleaved:N")


# -- what is printed -------------------------------------------------------------------------------


def _named(plan: Planned) -> str:
    """A layout in a line, as --mesh takes it."""
    from outsize.collectives.axes import AXES, axis_of

    lay = plan.layout
    sizes = {
        "rows": lay.data // lay.expert, "weights": lay.tensor, "stages": lay.pipeline,
        "tokens": lay.context,
    }  # fmt: skip
    axes = [axis_of(name) for name in AXES.names()]
    found = {axis.name: lay.expert if axis.parts else sizes[axis.cuts] for axis in axes}
    return ",".join(f"{name}={size}" for name, size in found.items() if size > 1) or "1"


def _zero(plan: Planned) -> int:
    return 3 if plan.layout.shards > 1 else 1 if plan.layout.states > 1 else 0


def _bytes(plan: Planned) -> dict[str, float]:
    """Of the fullest worker by kind, with the reserves that are kept."""
    from outsize.foresight.memory import COMMUNICATORS, CONTEXT

    held = plan.memory
    return {
        **held.states,
        "activations": held.activations,
        "head": held.head,
        "gathered": held.gathered,
        "fragmentation": held.reserved - held.tensors,
        "driver": CONTEXT,
        "communicators": COMMUNICATORS * held.axes,
    }


def _as_json(made: Choice, cost: Mapping[str, float]) -> dict[str, Any]:
    return {
        "counted": made.counted,
        "fitting": made.fitting,
        **cost,
        "plans": [
            {
                "mesh": _named(each),
                "microbatch_rows": each.layout.rows,
                "recompute": each.layout.recompute,
                "zero": _zero(each),
                "chunks": each.layout.chunks,
                "step_seconds": each.seconds,
                "low": each.low,
                "high": each.high,
                "tokens_per_s": each.tokens / each.seconds,
                "mfu": each.mfu,
                "seconds_by_lane": {k: v for k, v in each.lanes.items() if v},
                "bytes": _bytes(each),
                "fits": each.fits,
                "only_foretold": each.layout.foretold_only,
            }
            for each in made.plans
        ],
    }


def _print(made: Choice, asked: Asked, cluster: Cluster, cost: Mapping[str, float]) -> None:
    from outsize.memory import format_bytes
    from outsize.screen import FIGURES, console, say, show, table

    out, best = console(), made.plans[0]
    rows = table("mesh", "rows", "recompute", "zero", "chunks", "step", "from", "to", "tokens/s",
                 "MFU", "memory", right=FIGURES)  # fmt: skip
    for each in made.plans:
        rows.add_row(
            _named(each), str(each.layout.rows), each.layout.recompute, str(_zero(each)),
            str(each.layout.chunks), f"{each.seconds:.3g} s", f"{each.low:.3g}",
            f"{each.high:.3g}", f"{each.tokens / each.seconds:,.0f}", f"{each.mfu:.1%}",
            format_bytes(int(each.memory.process)),
        )  # fmt: skip
    show(out, rows)
    lanes = table("lane", "seconds", right=FIGURES)
    for name, value in sorted(best.lanes.items(), key=lambda item: -item[1]):
        if value > best.seconds / 1000:
            lanes.add_row(name, f"{value:.3g}")
    held = table("bytes of the fullest worker", "", right=FIGURES)
    for name, size in _bytes(best).items():
        if size:
            held.add_row(name, format_bytes(int(size)))
    show(out, lanes, held)
    say(out, *_said(made, asked, cluster, cost))


def _said(made: Choice, asked: Asked, cluster: Cluster, cost: Mapping[str, float]) -> list[str]:
    from outsize.memory import format_bytes

    best = made.plans[0]
    missing = best.memory.process - best.room
    room = format_bytes(best.room)
    lines = [
        f"{asked.batch} rows of {asked.sequence} tokens a step; {cluster.count} devices"
        f" ({cluster.groups[0].device.name})",
        f"{made.fitting} of {made.counted} layouts fit; {best.binds} takes longest",
        "MFU: 3 (2 N + scores with a causal mask) operations a token, N without the embedding,"
        " of the devices' dense peak",
        f"fits: {format_bytes(int(-missing))} less than {room}" if best.fits else
        f"does not fit: {format_bytes(int(missing))} more than the {room} of a device",
    ]  # fmt: skip
    if cluster.tiers:
        names = ", ".join(tier.name for tier in cluster.tiers)
        lines.append(f"{names}: not used by this forecast")
    if best.layout.foretold_only:
        lines.append(f"{best.layout.precision} is foretold only: this runtime has it not")
    units = {"days": " days", "device_hours": " device-hours", "money": " money", "kwh": " kWh"}
    if cost:
        lines.append("; ".join(f"{value:,.1f}{units[name]}" for name, value in cost.items()))
    return lines
