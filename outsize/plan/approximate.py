"""What changes the maths: the names that `approximate` may hold, their settings, what clashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from outsize.errors import OutsizeError, expect, nearest
from outsize.registry import TECHNIQUES

if TYPE_CHECKING:
    from outsize.collectives import Mesh
    from outsize.plan.plan import Plan

PARTIAL = "partial-pipeline"
MICROBATCH = "microbatch-statistics"
APPROXIMATE: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16-weights": "weights updated in bfloat16 without a float32 master copy",
        PARTIAL: "microbatches that leave stages of a pipeline out (SkipPipe)",
        MICROBATCH: "batch normalisation by each microbatch's own statistics (GPipe), in prepare",
    }
)
AUXILIARY = ("head", "block", "momentum")


def known_names() -> tuple[str, ...]:
    """What `approximate` may hold: the names above, and techniques that change the maths."""
    return (*APPROXIMATE, *(name for name, one in TECHNIQUES.items() if not one.exact))


def check_axes(names: Iterable[str], mesh: Mesh) -> None:
    """OutsizeError for one that does nothing where an axis has one worker. Asked of what a user
    wants: a plan of one worker may be a sample of a larger one."""
    for name in names:
        one = TECHNIQUES.find(name)
        if one is not None and one.axis and mesh[one.axis] == 1:
            raise OutsizeError(
                f"plan.approximate holds {name}, but mesh.{one.axis} is 1 and nothing would be"
                f" done: leave it out, or set mesh to {one.axis}=2"
            )


@dataclass(frozen=True)
class Local:
    """Local learning. groups: runs of blocks between which no gradient passes.

    auxiliary: what a group but the last has before its own head: nothing ("head"), a block that
    learns ("block"), or beside it a moving average of the next group's first block ("momentum").
    momentum: what that average keeps of itself each step.
    """

    groups: int = 2
    auxiliary: Literal["head", "block", "momentum"] = "momentum"
    momentum: float = 0.995

    def __post_init__(self) -> None:
        expect(self.groups >= 2, "plan: local.groups", self.groups, "2 or more")
        if self.auxiliary not in AUXILIARY:
            raise OutsizeError(
                f"plan: local.auxiliary is {self.auxiliary!r}{nearest(self.auxiliary, AUXILIARY)}"
            )
        holds = 0 <= self.momentum < 1
        expect(holds, "plan: local.momentum", self.momentum, "0 or more and less than 1")


def clash(plan: Plan, approximate: Iterable[str]) -> tuple[str, str] | None:
    """A name under `approximate` and what it cannot go with, which the plan has: it computes
    otherwise, or nothing would be done."""
    if PARTIAL in approximate and (
        plan.mesh.pipeline == 1 or not plan.pipeline.schedule.startswith("skip")
    ):
        return PARTIAL, "a pipeline.schedule that leaves no stage out: expected skip-pipe"
    for name in approximate:
        one = TECHNIQUES.find(name)
        for what, found in () if one is None else one.clashes:
            if found(plan):
                return name, what
    return None
