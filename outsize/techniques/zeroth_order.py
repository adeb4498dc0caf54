"""Zeroth-order steps: two losses along a random direction in place of a backward pass.

Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO), 2023; on weights that
stream: Wang et al., "ZO2", 2025. outsize/runtime/special/zeroth.py has the handlers that play it.

    plan: {approximate: [zeroth-order]}
    zeroth-order: {epsilon: 1e-3}
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.registry import setting, technique

KEY = "zeroth-order"


@dataclass(frozen=True)
class ZerothOrder:
    """Of a run whose plan.approximate names it."""

    epsilon: float = setting(1e-3, "how far from the weights the losses are taken", least=0)


technique(
    KEY, ZerothOrder, "settings of plan.approximate: [zeroth-order]", exact=False,
    touches=frozenset({"the backward pass", "optimizer states"}),
    method="outsize.runtime.special.zeroth.Losses",
    clashes=(
        (
            "precision float16: its losses are scaled for a backward pass, and there is none",
            lambda p: p.precision.scaled,
        ),
        (
            "states other than parameters below the device: there are none",
            lambda p: p.rests_below("gradients", "optimizer", "activations"),
        ),
        (
            "parameters below the device that workers cut: an update would have to go through it",
            lambda p: p.shards.parameters > 1 and p.rests_below("parameters"),
        ),
        ("recompute", lambda p: any(stage.recompute for stage in p.stages)),
        (
            "zero 1 or 2: there are no gradients and optimizer states to cut",
            lambda p: p.shards.parameters < p.shards.optimizer,
        ),
        (
            "ends that a pipeline's workers share: its step has the passes of whole ones alone",
            lambda p: p.pipeline.ends is not None,
        ),
        ("split_backward", lambda p: p.split_backward),
        ("update: behind", lambda p: p.update == "behind"),
    ),
)  # fmt: skip
