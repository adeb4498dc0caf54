"""Local learning: groups of blocks that learn by losses of their own.

Su et al., "Momentum Auxiliary Network for Supervised Local Learning", 2024.
outsize/runtime/special/local.py makes its steps.

    plan: {approximate: [local-learning]}
    local-learning: {groups: 2}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.registry import setting, technique

KEY = "local-learning"


@dataclass(frozen=True)
class LocalLearning:
    """Of a run whose plan.approximate names it; as outsize.plan.Local has them."""

    groups: int = setting(2, "runs of blocks with losses of their own", least=2)
    auxiliary: Literal["head", "block", "momentum"] = setting(
        "momentum", "what a group has before its head: nothing, a block, or an average beside it"
    )
    momentum: float = setting(0.995, "what the average keeps of itself each step", least=0, most=1)


technique(
    KEY, LocalLearning, "settings of plan.approximate: [local-learning]", exact=False,
    touches=frozenset({"the backward pass", "how a stage runs"}),
    method="outsize.runtime.special.local.Groups",
    clashes=(
        (
            "precision float16: a group may have stepped when the next one's gradient overflows",
            lambda p: p.precision.scaled,
        ),
        (
            "states below the device: every group would have a pool of its own",
            lambda p: p.rests_below("parameters", "gradients", "optimizer", "activations"),
        ),
        (
            "zero: an average of weights follows whole ones",
            lambda p: p.shards.optimizer > 1,
        ),
        (
            "mesh pipeline: a group makes its whole step before the next one, so that one worker"
            " would work at a time",
            lambda p: p.mesh.pipeline > 1,
        ),
    ),
)  # fmt: skip
