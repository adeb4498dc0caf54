"""What changes the maths: the names that `approximate` may hold, their settings, what clashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from outsize.errors import OutsizeError, nearest
from outsize.registry import TECHNIQUES

if TYPE_CHECKING:
    from outsize.plan.plan import Plan

PARTIAL = "partial-pipeline"
APPROXIMATE: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16-weights": "weights updated in bfloat16 without a float32 master copy",
        "zeroth-order": "two losses along a random direction in place of a gradient (MeZO, ZO2)",
        "frozen-by-dynamics": "weights that change least are left alone for a while (SlimFit)",
        "local-learning": "groups of blocks, each trained by a loss of its own (MAN)",
        PARTIAL: "microbatches that leave stages of a pipeline out (SkipPipe)",
    }
)
ALONE = ("zeroth-order", "frozen-by-dynamics", "local-learning")  # they run on one worker
AUXILIARY = ("head", "block", "momentum")


def known_names() -> tuple[str, ...]:
    """What `approximate` may hold: the names above, and techniques that change the maths."""
    return (*APPROXIMATE, *(name for name, one in TECHNIQUES.items() if not one.exact))


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
        if self.groups < 2:
            raise OutsizeError(f"plan: local.groups is {self.groups}; expected 2 or more")
        if self.auxiliary not in AUXILIARY:
            raise OutsizeError(
                f"plan: local.auxiliary is {self.auxiliary!r}{nearest(self.auxiliary, AUXILIARY)}"
            )
        if not 0 <= self.momentum < 1:
            raise OutsizeError(
                f"plan: local.momentum is {self.momentum}; expected 0 or more and less than 1"
            )


_STATES = ("parameters", "gradients", "optimizer", "activations")

# What a name under `approximate` cannot go with: it computes otherwise, or nothing would be done.
CLASHES: tuple[tuple[str, str, Callable[[Plan], bool]], ...] = (
    (
        "zeroth-order",
        "states other than parameters below the device: there are none",
        lambda p: p.rests_below("gradients", "optimizer", "activations"),
    ),
    ("zeroth-order", "recompute", lambda p: any(stage.recompute for stage in p.stages)),
    ("zeroth-order", "split_backward", lambda p: p.split_backward),
    ("zeroth-order", "update: behind", lambda p: p.update == "behind"),
    (
        "frozen-by-dynamics",
        "parameters or optimizer states below the device: what is frozen would move all the same",
        lambda p: p.rests_below("parameters", "optimizer"),
    ),
    (
        "local-learning",
        "states below the device: every group would have a pool of its own",
        lambda p: p.rests_below(*_STATES),
    ),
    (
        PARTIAL,
        "a pipeline.schedule that leaves no stage out: expected skip-pipe",
        lambda p: p.mesh.pipeline == 1 or not p.pipeline.schedule.startswith("skip"),
    ),
    ("local-learning", "sequence_chunk", lambda p: p.sequence_chunk > 0),
)
