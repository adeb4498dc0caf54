"""What is asked of a plan: what is trained, what a layout must and must not have, what is least.

A condition is about one name of a layout: "pipeline=1", "zero<3", "rows>=2", "recompute=full"; a
name alone asks for any of it ("recompute", "pipeline": more than one stage).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from outsize.errors import OutsizeError, nearest
from outsize.foresight.layout import Layout
from outsize.foresight.planning.lengths import WHOLE, Lengths

Objective = Literal["time", "memory", "cost", "energy"]
Value = int | str
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "cost", "energy")
RECOMPUTE = ("none", "part", "full")  # of the blocks of every stage
# Axes that techniques declare are called what a layout calls them: it has them behind the core's.
_AXES = [each.name for each in fields(Layout)]
TOKENS, EXPERTS = _AXES[_AXES.index("pipeline") + 1 :][:2]
# What is none of each name: a name alone asks for more.
NONE: Mapping[str, Value] = {
    "devices": 0, "data": 1, "tensor": 1, "pipeline": 1, TOKENS: 1, EXPERTS: 1, "rows": 0,
    "microbatches": 1, "chunks": 1, "zero": 0, "shards": 1, "sequence-parallel": 0,
    "recompute": "none",
}  # fmt: skip
# Of these names a layout has no other values.
VALUES: Mapping[str, tuple[Value, ...]] = {
    "zero": (0, 1, 3), "sequence-parallel": (0, 1), "recompute": RECOMPUTE,
}  # fmt: skip
_SIGNS: Mapping[str, Callable[[int, int], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq,
    "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_FORM = re.compile(r"([a-z-]+)\s*(?:(<=|>=|!=|=|<|>)\s*(\S+))?")


@dataclass(frozen=True)
class Condition:
    """One name of a layout against a value."""

    name: str
    sign: str
    value: Value

    def holds(self, value: Value) -> bool:
        if isinstance(value, str) or isinstance(self.value, str):
            return (value == self.value) == (self.sign == "=")
        return _SIGNS[self.sign](value, self.value)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value}"


def conditions(said: Iterable[str], option: str) -> tuple[Condition, ...]:
    """Those that an option says, several behind commas. Raises OutsizeError naming the option."""
    return tuple(_condition(one.strip(), option) for each in said for one in each.split(","))


def _condition(text: str, option: str) -> Condition:
    found = _FORM.fullmatch(text)
    if found is None:
        raise OutsizeError(f"{option} {text!r}: expected as pipeline=1, zero<3 or recompute")
    name, sign, value = found.groups()
    if name not in NONE:
        raise OutsizeError(f"{option} {text!r}: {name!r} is unknown{nearest(name, tuple(NONE))}")
    if sign is None:
        return Condition(name, "!=" if name == "recompute" else ">", NONE[name])
    if name == "recompute":
        if value not in RECOMPUTE or sign not in ("=", "!="):
            raise OutsizeError(f"{option} {text!r}: expected recompute=none, part or full")
        return Condition(name, sign, value)
    if not value.isdecimal():
        raise OutsizeError(f"{option} {text!r}: {value!r} is no number; expected as {name}=2")
    return Condition(name, sign, int(value))


@dataclass(frozen=True)
class Conditions:
    """All that a layout must and must not have."""

    required: tuple[Condition, ...] = ()
    forbidden: tuple[Condition, ...] = ()

    def allow(self, name: str, value: Value) -> bool:
        return all(one.holds(value) for one in self.required if one.name == name) and not any(
            one.holds(value) for one in self.forbidden if one.name == name
        )

    def among(self, name: str, usual: Iterable[Value]) -> tuple[Value, ...]:
        """Of the usual values those that are allowed, and one that is required beside them."""
        said = [one.value for one in self.required if one.name == name and one.sign == "="]
        if name in VALUES:
            said = []
        return tuple(v for v in dict.fromkeys((*usual, *said)) if self.allow(name, v))

    def with_required(self, *more: Condition) -> Conditions:
        return Conditions((*self.required, *more), self.forbidden)

    def check(self) -> None:
        """Refuse what no layout whatever could have: requirements against each other."""
        for name in NONE:
            about = [one for one in (*self.required, *self.forbidden) if one.name == name]
            numbers = {one.value + d for one in about if isinstance(one.value, int)
                       for d in (-1, 0, 1)}  # fmt: skip
            tried = VALUES.get(name) or sorted({*(n for n in numbers if n >= 1), 1})
            if about and not self.among(name, tried):
                known = ", ".join(map(str, VALUES.get(name, ("another value",))))
                raise OutsizeError(
                    f"{self.said(name)}: no layout has both; leave one of them out"
                    if len(about) > 1
                    else f"{self.said(name)}: no layout has it; expected {known}"
                )

    def said(self, name: str = "") -> str:
        """As options have it: of one name, or all."""
        parts = [f"--require {one}" for one in self.required if name in ("", one.name)]
        parts += [f"--forbid {one}" for one in self.forbidden if name in ("", one.name)]
        return " and ".join(parts)


def value_of(layout: Layout, name: str) -> Value:
    """What a layout has of a name of a condition."""
    if name == "zero":
        return 3 if layout.shards > 1 else 1 if layout.states > 1 else 0
    if name == "shards":
        return max(layout.shards, layout.states)
    if name == "recompute":
        return "part" if layout.whole else layout.recompute
    if name == "sequence-parallel":
        return int(layout.sequence_parallel)
    return int(getattr(layout, name))


@dataclass(frozen=True)
class Asked:
    """What is to be trained, on which terms. batch: rows of a step; memory: bytes of a device, at
    most (None: what it has); devices: at most (None: all); seconds: of searching; carried_out:
    whether this runtime is to do it, which cuts states over the workers that have the same experts,
    not over those of all experts as Megatron's does; lengths: of documents, whole rows where
    nothing is said."""

    sequence: int
    batch: int
    precision: str = "bf16"
    conditions: Conditions = Conditions()
    memory: int | None = None
    devices: int | None = None
    objective: Objective = "time"
    seconds: float = 10.0
    carried_out: bool = False
    lengths: Lengths = WHOLE

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise OutsizeError(
                f"objective {self.objective!r} is unknown{nearest(self.objective, OBJECTIVES)}"
            )
        self.conditions.check()


def named(values: Mapping[str, Value], least: Sequence[str] = ()) -> tuple[Condition, ...]:
    """Conditions that names have these values, and of `least` that they are none."""
    return tuple(Condition(name, "=", value) for name, value in values.items()) + tuple(
        Condition(name, "=", NONE[name]) for name in least if name not in values
    )
