"""`outsize plan --hardware`: what is asked of hardware that is not here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outsize.cli.command import refuse_unused
from outsize.errors import OutsizeError, nearest

if TYPE_CHECKING:
    from outsize.foresight.planning.asked import Asked, Condition, Value
    from outsize.foresight.planning.choose import Choice, Planned
    from outsize.foresight.shape import Shape
    from outsize.hardware import Cluster, Rate
    from outsize.plan import Plan

SEQUENCE, TOKENS = 4096, 4 << 20  # of a row, and of a step, where nothing is said
KEYS = (
    "train.sequence", "train.batch_tokens", "plan.microbatch_rows", "plan.recompute", "plan.zero",
    "plan.pipeline", "plan.sequence_parallel", "precision",
)  # fmt: skip
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_OF_STEP = {**_COUNT, "K": 1 << 10, "M": 1 << 20}  # rows of a step are shared: 4M is 4 x 2^20
_OPTIONS = (
    click.option(
        "--hardware", metavar="SPEC", help="Plan for it, as '128 x 8 A100-SXM-80 @ 25GB/s'."
    ),
    click.option("--require", multiple=True, metavar="WHAT", help="As pipeline=1; repeatable."),
    click.option("--forbid", multiple=True, metavar="WHAT", help="As 'zero<3', recompute."),
    click.option("--max-devices", type=click.IntRange(1), help="Take no more of them."),
    click.option("--objective", default="time", help="What is least: time, memory, cost, energy."),
    click.option(
        "--seconds",
        type=click.FloatRange(0.1, 1e6),
        default=10.0,
        help="Processor time of searching; 10.",
    ),
    click.option("--explain", is_flag=True, help="Why this plan, and what would change it."),
    click.option(
        "--html", metavar="FILE", type=click.Path(path_type=Path), help="Draw the best plan's step."
    ),
    click.option("--lengths", metavar="L:N,...", help="Of whole documents, as 512:70,2048:30."),
    click.option("--tokens", metavar="N", help="Tokens of the whole run, as 2T: days and hours."),
    click.option("--price", metavar="N/h", help="Of a device and hour, as 2.50/h."),
    click.option("--watts", type=float, help="Of a device in use, instead of the catalogue's."),
    click.option("--top", type=click.IntRange(1, 100), default=5, help="Plans to show; 5."),
)
_NAMES = (
    "hardware", "require", "forbid", "max_devices", "objective", "seconds", "explain", "html",
    "lengths", "tokens", "price", "watts", "top",
)  # fmt: skip

_LIKE = ("max_devices", "explain", "html", "lengths")  # of devices of one kind alone


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
    require: tuple[str, ...]
    forbid: tuple[str, ...]
    max_devices: int | None
    objective: str
    seconds: float
    explain: bool
    html: Path | None
    lengths: str | None
    tokens: str | None
    price: str | None
    watts: float | None
    top: int

    def refuse(self, ctx: click.Context) -> None:
        """OutsizeError for options that say nothing without --hardware."""
        refuse_unused(ctx, _NAMES[1:], without="--hardware")

    def plan(
        self, ctx: click.Context, name: str | None, sets: tuple[str, ...],
        places: Mapping[str, Any], out: Path | None, as_json: bool,
    ) -> None:  # fmt: skip
        """Choose, print, and write the best as a plan where that is asked."""
        from outsize.cli.elsewhere_shown import Answer, show
        from outsize.foresight.named import is_factory, shape_of
        from outsize.foresight.planning.choose import choose
        from outsize.foresight.planning.written import plan_of
        from outsize.hardware import parse_spec

        other = ("prompt_tokens", "host_memory", "disk", "tiers", "workers", "max_tokens",
                 "temperature", "top_k", "top_p")  # fmt: skip
        refuse_unused(ctx, other, "--hardware, which has no part of it")
        if name is None:
            raise OutsizeError("no model; expected as `outsize plan llama3-70b --hardware SPEC`")
        cluster = parse_spec(self.hardware or "")
        frozen, sets = _parted(name, sets)
        asked, tokens = self._asked(sets, places, cluster)
        if is_factory(name):
            from outsize.cli.elsewhere_module import module_of

            asked, shape = module_of(name, cluster, asked, tokens, _values(sets).keys())
        elif not asked.batch:
            raise OutsizeError(
                f"train.batch_tokens is {tokens}; expected {asked.sequence} or more, a row"
            )
        elif frozen:
            from outsize.cli.elsewhere_tuned import tuned_of

            asked, shape = tuned_of(name, cluster, asked, frozen, out is not None)
        else:
            shape = shape_of(name)
        asked = replace(asked, carried_out=out is not None)
        if not cluster.alike:
            from outsize.cli.elsewhere_unlike import show_unlike
            from outsize.foresight.planning.unlike import choose_unlike

            refuse_unused(ctx, _LIKE, "unlike devices, of which it is not known yet")
            price = self._rates(cluster)
            plans = choose_unlike(shape, asked, cluster, self.top)
            uneven, step = plans[0], float(asked.batch * asked.sequence)
            cost = self._cost(step, uneven.seconds, cluster.count, price)
            plan = plan_of(shape, uneven.layout, uneven.blocks, uneven.shares) if out else None
            _write(out, name, plan)
            show_unlike(name, asked, plans, cost, as_json)
            return
        price = self._rates(cluster)
        made = choose(shape, asked, cluster, self.top)
        if not made.plans:
            raise OutsizeError(_nothing_fits(name, shape, asked, cluster, made))
        if self.html is not None:
            _draw(self.html, name, shape, cluster, made.plans[0])
        best = made.plans[0]
        step = best.tokens * asked.lengths.filled
        cost = self._cost(step, best.seconds, best.layout.devices, price)
        answer = Answer(shape, asked, cluster, made, cost)
        digest = "" if shape.module is None else shape.module.digest
        _write(out, name, plan_of(shape, best.layout) if out else None, best.machines, digest)
        show(answer, self.explain, as_json)

    def _asked(
        self, sets: tuple[str, ...], places: Mapping[str, Any], cluster: Cluster
    ) -> tuple[Asked, int]:  # fmt: skip
        """What is asked, and the tokens of a step."""
        from outsize.foresight.planning.asked import Asked, Conditions, conditions
        from outsize.foresight.planning.lengths import WHOLE, lengths
        from outsize.memory import parse_bytes

        said = _values(sets)
        if math.isnan(self.seconds):  # which is in every range
            raise OutsizeError(f"--seconds is {self.seconds}; expected 0.1 or more")
        sequence = _count(said.get("train.sequence", SEQUENCE), "train.sequence", _OF_STEP)
        tokens = _count(said.get("train.batch_tokens", TOKENS), "train.batch_tokens", _OF_STEP)
        required = (*conditions(self.require, "--require"), *_fixed(said))
        if places["mesh"]:
            required = (*required, *_mesh(places["mesh"], cluster.count))
        objective: Any = self.objective
        documents = lengths(self.lengths, sequence) if self.lengths is not None else WHOLE
        asked = Asked(
            sequence,
            tokens // sequence,
            _precision(said.get("precision"), cluster),
            Conditions(required, conditions(self.forbid, "--forbid")),
            parse_bytes(places["memory"]) if places["memory"] else None,
            self.max_devices,
            objective, self.seconds, lengths=documents,
        )  # fmt: skip
        return asked, tokens

    def _rates(self, cluster: Cluster) -> tuple[float | None, float | None]:
        """Money an hour and watts of a device, as said or as its sheet has them; of unlike ones
        their mean. Raises OutsizeError where the objective asks for one that nobody knows."""
        price, watts = _price(self.price), self.watts
        if watts is not None and not 0 < watts < math.inf:
            raise OutsizeError(f"--watts is {watts}; expected more than 0")
        price = price or _mean(cluster, [group.device.price for group in cluster.groups])
        watts = watts or _mean(cluster, [group.device.watts for group in cluster.groups])
        if self.objective == "cost" and price is None:
            raise OutsizeError("--objective cost without a price; expected --price, as 2.50/h")
        if self.objective == "energy" and watts is None:
            raise OutsizeError("--objective energy without watts; expected --watts, as 700")
        return price, watts

    def _cost(
        self, tokens: float, step: float, devices: int, rates: tuple[float | None, float | None]
    ) -> dict[str, float]:
        """Days, device-hours, money and kWh of the whole run, as far as they are known. tokens,
        step: of one step, and its seconds."""
        if self.tokens is None:
            return {}
        price, watts = rates
        seconds = _count(self.tokens, "--tokens") / tokens * step
        hours = seconds / 3600 * devices
        found = {"days": seconds / 86400, "device_hours": hours}
        if price is not None:
            found["money"] = price * hours
        if watts is not None:
            found["kwh"] = watts * hours / 1000
        return found


def _mean(cluster: Cluster, rates: Sequence[Rate | None]) -> float | None:
    """Over all devices, of what each group's have; None where a group's is not known."""
    known = [rate.value for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    counts = [group.count for group in cluster.groups]
    return sum(n * value for n, value in zip(counts, known, strict=True)) / cluster.count


def _nothing_fits(name: str, shape: Shape, asked: Asked, cluster: Cluster, made: Choice) -> str:
    """Bytes missing, the nearest plan, the fewest devices that would do."""
    from outsize.cli.elsewhere_shown import layout_said
    from outsize.foresight.planning.explain import fewest
    from outsize.foresight.resting import usable
    from outsize.memory import format_bytes

    near = made.nearest
    assert near is not None
    missing = format_bytes(int(near.memory.process - near.room))
    has = format_bytes(cluster.groups[0].device.memory_bytes)
    enough = fewest(shape, asked, cluster)
    advice = f"{enough} devices would do" if enough else "expected more memory"
    if cluster.tiers:
        names, said = ", ".join(tier.name for tier in cluster.tiers), "not used by this forecast"
        advice = f"{advice} ({names}: {'searched too' if usable(cluster) else said})"
    return (
        f"{name} fits in none of {made.counted} layouts on {cluster.count}"
        f" {cluster.groups[0].device.name}: the nearest ({layout_said(near.layout)}) lacks"
        f" {missing} beyond {format_bytes(near.room)} of a device's {has}; {advice}"
    )


# -- what is asked ---------------------------------------------------------------------------------


def _parted(name: str, sets: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys that say what is frozen, and the others. OutsizeError for some of a factory's module."""
    from outsize.cli.elsewhere_tuned import freezes
    from outsize.foresight.named import is_factory

    frozen = tuple(one for one in sets if freezes(one.partition("=")[0]))
    if frozen and is_factory(name):
        raise OutsizeError(f"{frozen[0]} of {name}: a factory's module says what is trained")
    return frozen, tuple(one for one in sets if one not in frozen)


def _values(sets: tuple[str, ...]) -> dict[str, Any]:
    """Of KEY=VALUE, each of a key that a forecast asks."""
    import yaml

    found: dict[str, Any] = {}
    for each in sets:
        key, equals, value = each.partition("=")
        if key not in KEYS:
            known = nearest(key, KEYS)
            raise OutsizeError(f"--set {each}: {key!r} is no key of a forecast elsewhere{known}")
        if not equals:
            raise OutsizeError(f"--set {each}: no value; expected {each}=VALUE")
        found[key] = yaml.safe_load(value)
    return found


def _fixed(said: Mapping[str, Any]) -> Iterator[Condition]:
    """Conditions that keys of a run are."""
    from outsize.foresight.planning.asked import named

    values: dict[str, Value] = {}
    if said.get("plan.microbatch_rows") is not None:
        values["rows"] = _count(said["plan.microbatch_rows"], "plan.microbatch_rows")
    zero = said.get("plan.zero")
    if zero not in (None, 0, 1, 3):
        raise OutsizeError(f"plan.zero is {zero!r}; --hardware forecasts 0, 1 and 3")
    if zero is not None:
        values["zero"] = zero
    recompute = said.get("plan.recompute")
    if recompute not in (None, [], ["block"]):
        raise OutsizeError(f"plan.recompute is {recompute}; --hardware forecasts [] and [block]")
    if recompute is not None:
        values["recompute"] = "full" if recompute else "none"
    parallel = said.get("plan.sequence_parallel")
    if parallel not in (None, True, False):
        raise OutsizeError(f"plan.sequence_parallel is {parallel!r}; expected true or false")
    if parallel is not None:
        values["sequence-parallel"] = int(parallel)
    if said.get("plan.pipeline") is not None:
        values["chunks"] = _chunks(said["plan.pipeline"])
    yield from named(values)


def _precision(said: Any, cluster: Cluster) -> str:
    """As catalogues call it. Where nothing is said, 16 bits, and 32 on a processor."""
    from outsize.foresight.planning.written import PRECISIONS

    if said is None:
        return "bf16" if cluster.groups[0].device.apart else "fp32"
    return {name: short for short, name in PRECISIONS.items()}.get(str(said), str(said))


def _draw(path: Path, name: str, shape: Shape, cluster: Cluster, best: Planned) -> None:
    """The timeline of a step, as a page."""
    from outsize.foresight.planning.drawn import drawn
    from outsize.report import write_timeline

    title = f"{name} on {best.layout.devices} x {cluster.groups[0].device.name}, foretold"
    write_timeline(path, drawn(shape, cluster, best), budget=best.room, title=title)


def _write(
    path: Path | None, name: str, plan: Plan | None, machines: tuple[int, ...] = (),
    parameters: str = "",
) -> None:  # fmt: skip
    """A plan, for `outsize train --plan` or `prepare`, where it is asked for. Which parameters it
    is for is known of models that this runtime has and of a factory's; of others the number of
    their blocks."""
    from outsize.models.families import parse
    from outsize.models.presets import PRESETS
    from outsize.plan.file import PlanFile, write_plan
    from outsize.train.planned import file_of

    if path is None or plan is None:
        return
    file = PlanFile(plan, model=name, parameters=parameters)
    if name in PRESETS and not parameters:
        file = file_of(plan, name, parse(PRESETS[name]))
    moved = machines if list(machines) != sorted(machines) else ()
    write_plan(path, replace(file, machines=moved))


def _count(value: Any, what: str, units: Mapping[str, int] = _COUNT) -> int:
    """A number, as 4M or 2T too."""
    text = str(value).strip()
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        found = float(text[: len(text) - len(unit)]) * units[unit]
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


def _mesh(text: str, count: int) -> tuple[Condition, ...]:
    """What a mesh says of a layout; the data axis is what is left."""
    from outsize.collectives import parse_mesh
    from outsize.collectives.axes import axis_of
    from outsize.foresight.planning.asked import EXPERTS, TOKENS, named

    names = {"weights": "tensor", "stages": "pipeline", "tokens": TOKENS, "rows": "data"}
    mesh, values = parse_mesh(text), dict.fromkeys((*names.values(), EXPERTS), 1)
    for name, size in mesh.sizes:
        values[EXPERTS if axis_of(name).parts else names[axis_of(name).cuts]] *= size
    rows = values.pop("data")
    if count % mesh.size or (rows > 1 and mesh.size != count):
        raise OutsizeError(
            f"mesh {text} has {mesh.size} workers, the hardware {count}; expected as many, or axes"
            " that divide them"
        )
    return named(values)


def _chunks(value: Any) -> int:
    name, _, number = str(value).partition(":")
    if name == "1f1b" and not number:
        return 1
    if name == "interleaved" and number.isdecimal() and int(number) > 1:
        return int(number)
    raise OutsizeError(f"plan.pipeline is {value}; --hardware forecasts 1f1b and interleaved:N")
