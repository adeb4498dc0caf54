"""A Plan as YAML and as an explanation; reading refuses what it does not know."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import yaml

from outsize.errors import OutsizeError, nearest
from outsize.plan.plan import BYTES, Plan


def to_yaml(plan: Plan) -> str:
    """A plan as YAML; `from_yaml` gives back an equal plan."""
    return yaml.safe_dump(_plain(dataclasses.asdict(plan)), sort_keys=False)


def from_yaml(text: str) -> Plan:
    """Read a plan, refusing unknown keys, wrong types and what a Plan refuses."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OutsizeError(f"plan: not YAML: {' '.join(str(error).split())}") from None
    plan: Plan = _read(Plan, data, "plan")
    return plan


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `kind`; errors name the place."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _read(next(a for a in args if a is not type(None)), value, where)
    if origin is typing.Literal:
        if value not in args:
            raise OutsizeError(f"{where}: {value!r}; expected one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise OutsizeError(f"{where}: {value!r}; expected a list")
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise OutsizeError(f"{where}: {value!r}; expected {kind.__name__}")
    return value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise OutsizeError(f"{where}: {value!r}; expected a mapping of {kind.__name__}'s keys")
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            raise OutsizeError(f"{where}: unknown key {key!r}{nearest(str(key), tuple(hints))}")
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    for key in sorted(required - set(value)):
        raise OutsizeError(f"{where}: key {key!r} is missing; expected {hints[key]}")
    return kind(**{key: _read(hints[key], item, f"{where}.{key}") for key, item in value.items()})


def explain(plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of (what, value, what it means) that tell what a plan does."""
    precision = plan.precision
    held = BYTES[precision.compute] + BYTES[precision.gradients] + 2 * BYTES[precision.optimizer]
    held += BYTES[precision.master] if precision.master else 0
    rows = [
        ("stages", str(len(plan.stages)), f"runs of the model's {plan.segments} segments"),
        (
            "microbatches",
            str(plan.microbatches),
            f"{plan.rows} rows a step, {plan.microbatch_rows} at a time; gradients add up",
        ),
        (
            "precision",
            precision.compute,
            f"master {precision.master or 'none: parameters are their own'}, gradients"
            f" {precision.gradients}, optimizer {precision.optimizer}:"
            f" {held} bytes a parameter with two moments",
        ),
        ("recompute", _recompute(plan), "computed again in the backward pass instead of kept"),
        ("loss chunk", _tokens(plan.loss_chunk), "tokens whose logits exist at once"),
        ("MLP tile", _tokens(plan.mlp_tile), "tokens whose feed-forward activations exist at once"),
    ]
    if plan.split_backward:
        rows.append(("split backward", "yes", "weight gradients after input gradients"))
    if plan.budget is not None:
        rows.append(("budget", f"{plan.budget:,} bytes", "of the device tier; more is refused"))
    rows.extend(("approximate", name, "changes the maths, as asked") for name in plan.approximate)
    return rows


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "all"


def _recompute(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for stage in plan.stages:
        name = "+".join(stage.recompute)
        if name:
            counts[name] = counts.get(name, 0) + stage.last - stage.first
    return ", ".join(f"{name} of {count} blocks" for name, count in counts.items()) or "nothing"
