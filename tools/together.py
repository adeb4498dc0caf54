"""docs/together.md: what cannot go together, asked of the product itself.

Every two of the switches below are put into one plan; where the product takes each of them alone
and refuses the two, its own line is the reason. What techniques declare to change is asked too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from outsize.collectives import Mesh
from outsize.collectives.axes import AXES
from outsize.errors import OutsizeError
from outsize.optim import OPTIMIZERS
from outsize.plan import Plan, Rest, Stage, zero
from outsize.plan.approximate import PARTIAL, known_names
from outsize.plan.settings import PLAN_SETTINGS
from outsize.plan.spread import pipelined
from outsize.registry import TECHNIQUES, Touching, refuse_shared
from outsize.runtime import AdoptedFlow

SEGMENTS, ROWS, SEQUENCE, WORKERS = 6, 8, 32, 2
NAMES = "approximate"

_HEAD = """# What does not go together

Made by `python tools/techniques.py`; do not edit. Each two switches of a row are accepted alone and
refused together before anything starts; the reason is the line that a user gets, of several the
first one's. What follows from another row (a schedule of a pipeline has the axis) is left out.

| one | other | reason |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Switch:
    """Something that a user switches on, and what it needs beside it. rest: tiers of states; more:
    other fields of a plan, by name."""

    name: str
    mesh: dict[str, int] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)
    recompute: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def beside(self, other: Switch) -> Switch | None:
        """Both; None where they say another value of the same thing."""
        if self.more.keys() & other.more.keys() - {NAMES}:
            return None
        names = (*self.more.get(NAMES, ()), *other.more.get(NAMES, ()))
        return Switch(
            f"{self.name} with {other.name}",
            self.mesh | other.mesh,
            self.rest | other.rest,
            self.recompute or other.recompute,
            self.more | other.more | ({NAMES: names} if names else {}),
        )

    def refusal(self) -> str:
        """What the product says to a plan that has it, empty where it takes it."""
        try:
            self.plan()
        except OutsizeError as error:
            return str(error)
        return ""

    def plan(self) -> Plan:
        """A plan that has it."""
        rest, blocks = Rest(**self.rest), ("block",) if self.recompute else ()
        stages = tuple(
            Stage(i, i + 1, blocks if 0 < i < SEGMENTS - 1 else (), rest) for i in range(SEGMENTS)
        )
        more = dict(self.more)
        stage = more.pop("zero", 0)
        mesh = Mesh(**self.mesh)
        return Plan(
            SEGMENTS, stages, ROWS, ROWS // 2, SEQUENCE, mesh=mesh, shards=zero(stage, mesh.data),
            **more,
        )  # fmt: skip


def switches() -> Iterator[Switch]:
    """Those of the core, then what techniques have registered."""
    yield Switch("`plan.recompute: [block]`", recompute=True)
    yield Switch("`plan.split_backward: true`", more={"split_backward": True})
    yield Switch("`order: layer` of a plan file", more={"order": "layer"})
    yield Switch("`update: behind` of a plan file", more={"update": "behind"})
    for state in ("parameters", "gradients", "optimizer", "activations"):
        shown = "optimizer states" if state == "optimizer" else state
        yield Switch(f"{shown} below the device", rest={state: "host"})
    for axis in AXES.names():
        yield Switch(f"`--mesh {axis}={WORKERS}`", mesh={axis: WORKERS})
    for stage in (1, 2, 3):
        yield Switch(f"`plan.zero: {stage}`", mesh={"data": WORKERS}, more={"zero": stage})
    cut = {"tensor": WORKERS}
    yield Switch("`plan.sequence_parallel: true`", mesh=cut, more={"sequence_parallel": True})
    line = {"pipeline": WORKERS}
    for text in ("zb-h1", "1f1b+vocabulary:1"):
        yield Switch(f"`plan.pipeline: {text}`", mesh=line, more={"pipeline": pipelined(text)})
    for name, one in PLAN_SETTINGS.items():
        mesh = {one.axis: WORKERS} if one.axis else {}
        more = {name: 4, **({NAMES: (one.approximate,)} if one.approximate else {})}
        said = f"`plan.{name}`" if one.run else f"`{name}` of a plan file"
        yield Switch(said, mesh, recompute=bool(one.recompute), more=more)
    for name in known_names():
        skipping: dict[str, Any] = {"pipeline": pipelined("skip-pipe:0.25")}
        own = name == PARTIAL
        more = {NAMES: (name,), **(skipping if own else {})}
        yield Switch(f"`plan.approximate: [{name}]`", line if own else {}, more=more)


def refused() -> Iterator[tuple[str, str, str]]:
    """(one, other, reason) of every two that are taken alone and refused together."""
    every = list(switches())
    for one in every:
        if said := one.refusal():
            raise AssertionError(f"{one.name} alone is refused: {said}")
    for one, other in itertools.combinations(every, 2):
        both = one.beside(other)
        if both is None or not (said := both.refusal()):
            continue
        simpler = (pair for pair in _bare(one, other) if pair is not None)
        if not any(pair.refusal() for pair in simpler):
            yield one.name, other.name, said


def _bare(one: Switch, other: Switch) -> Iterator[Switch | None]:
    """The two with one of them reduced to the workers or the recomputation that it needs."""
    for a, b in ((one, other), (other, one)):
        if a.more and (a.mesh or a.recompute):
            yield Switch("", a.mesh, recompute=a.recompute).beside(b)


def of_modules() -> Iterator[tuple[str, str, str]]:
    """(a module of the user's own, switch, reason) of every switch that is for native decoders."""
    model = nn.Sequential(*(nn.Identity() for _ in range(SEGMENTS - 2)))
    blocks = list(model.named_children())
    for one in switches():
        try:
            flow = AdoptedFlow(model, blocks, one.plan(), lambda output, _: output)
        except OutsizeError as error:
            yield "a module that `outsize.prepare()` adopts", one.name, str(error)
        else:
            flow.attach(None)


def declared() -> Iterator[tuple[str, str, str]]:
    """(one, other, reason) of an optimizer and a technique that change the same thing; other pairs
    are refused by a plan already."""
    optimizers = set(OPTIMIZERS.names()) - set(known_names())
    everything: dict[str, Touching] = dict(TECHNIQUES.items())
    everything.update(PLAN_SETTINGS.items())
    for name in sorted(optimizers & everything.keys()):
        for key in sorted(everything.keys() - set(OPTIMIZERS.names())):
            try:
                refuse_shared((), (everything[name], everything[key]))
            except OutsizeError as error:
                yield f"`optimizer.name: {name}`", f"`{key}`", str(error)


def page() -> str:
    """docs/together.md: one row for those that are refused for the same reason."""
    found = [
        (one, other, " ".join(said.removeprefix("plan: ").removeprefix("plan.").split()))
        for one, other, said in (*refused(), *declared(), *of_modules())
    ]
    by_other = _joined((other, _shape(said), one, said) for one, other, said in found)
    by_ones = _joined((ones, shape, other, said) for (other, shape), (ones, said) in by_other)
    lines = (f"| {ones} | {others} | {said} |" for (ones, _), (others, said) in by_ones)
    return _HEAD + "\n".join(lines) + "\n"


def _joined(
    rows: Iterable[tuple[str, str, str, str]],
) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """((kept, shape), (what differs in one cell, the first reason)) of rows (kept, shape, what
    differs, reason)."""
    groups: dict[tuple[str, str], tuple[list[str], str]] = {}
    for kept, shape, one, said in rows:
        groups.setdefault((kept, shape), ([], said))[0].append(one)
    return [(key, (", ".join(ones), said)) for key, (ones, said) in groups.items()]


def _shape(reason: str) -> str:
    """A reason without the names and numbers in which those of a kind differ."""
    names = "|".join(map(re.escape, (*AXES.names(), *known_names(), *OPTIMIZERS.names())))
    return re.sub(rf"\b({names})\b|\d+", "_", reason)
