"""Axes: what it means that workers differ along an axis of the mesh.

An axis says what its workers have different parts of; which workers hold the same parameters, who
has a part of a gradient, and how often a number counts in a sum over all workers follow from that.
The core declares the three of data, tensor and pipeline parallelism; a technique declares its own
in a file under outsize/techniques/axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from outsize.errors import OutsizeError, nearest
from outsize.registry import Registry

# What workers along an axis have different parts of: rows of a step, tokens of each row, the
# weights of a layer, or stages of the model.
Cuts = Literal["rows", "tokens", "weights", "stages"]


@dataclass(frozen=True)
class Clash:
    """Something of a plan that does not go with an axis. what: it, for the refusal; found: whether
    a plan (with an axis of several workers) has it; remedy: what to do instead."""

    what: str
    found: Callable[[Any], bool]
    remedy: str


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh. order: workers that differ along the axis of the highest order alone
    are neighbours. meaning: what its workers do, in a line. clashes: what its plans may not have.
    sharded: states may be cut over its workers (outsize/parallel/shards.py). parts: beside what
    `cuts` says, its workers hold different parts of some weights."""

    name: str
    order: int
    cuts: Cuts
    meaning: str
    clashes: tuple[Clash, ...] = ()
    sharded: bool = False
    parts: bool = False

    @property
    def batch(self) -> bool:
        """Its workers have different tokens of a step: counts and gradients are parts of sums."""
        return self.cuts in ("rows", "tokens")

    @property
    def inside(self) -> bool:
        """Its workers talk inside layers."""
        return self.parts or self.cuts in ("tokens", "weights")

    def check(self, plan: Any, size: int) -> None:
        """Refuse a plan with several workers on the axis that has what does not go with it."""
        for clash in self.clashes if size > 1 else ():
            if clash.found(plan):
                raise OutsizeError(
                    f"plan: mesh.{self.name} is {size}, and {clash.what}, which do not go together:"
                    f" {clash.remedy}"
                )


AXES: Registry[Axis] = Registry("axis")
DATA = AXES.add("data", Axis("data", 10, "rows", "workers that take different rows", sharded=True))
TENSOR = AXES.add("tensor", Axis("tensor", 30, "weights", "workers that share every product"))
PIPELINE = AXES.add("pipeline", Axis("pipeline", 0, "stages", "workers with different stages"))
CORE = MappingProxyType({axis.name: axis for axis in (DATA, TENSOR, PIPELINE)})


def axis_of(name: str) -> Axis:
    """The declaration of an axis. OutsizeError for a name that nobody declares, with the nearest.

    Those of the core are known before any technique is imported.
    """
    found = CORE.get(name) or AXES.find(name)
    if found is None:
        raise OutsizeError(f"mesh: axis {name!r}{nearest(name, AXES.names())}")
    return found


def ordered(names: Iterable[str]) -> tuple[Axis, ...]:
    """The declarations of some axes, in the order of the ranks: the last one's are neighbours."""
    return tuple(sorted(map(axis_of, names), key=lambda axis: axis.order))
