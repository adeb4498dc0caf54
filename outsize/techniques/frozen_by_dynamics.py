"""Freezing by dynamics: layers that change least are left alone for a while.

Ardakani et al., "SlimFit", 2023. outsize/runtime/special/freezing.py chooses the layers.

    plan: {approximate: [frozen-by-dynamics]}
    frozen-by-dynamics: {share: 0.5, keep: whole}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.registry import setting, technique

KEY = "frozen-by-dynamics"


@dataclass(frozen=True)
class FrozenByDynamics:
    """Of a run whose plan.approximate names it."""

    share: float = setting(0.5, "of the layers, those that each step leaves alone", least=0, most=1)
    keep: Literal["whole", "int8"] = setting(
        "whole", "what blocks keep for the backward pass, as it is or in 8 bits"
    )


technique(
    KEY, FrozenByDynamics, "settings of plan.approximate: [frozen-by-dynamics]", exact=False,
    touches=frozenset({"the backward pass"}),
    method="outsize.runtime.special.freezing.Freezing",
    clashes=(
        (
            "precision float16: a step that is skipped moves no layer, and all would seem calm",
            lambda p: p.precision.scaled,
        ),
        (
            "parameters or optimizer states below the device: what is frozen would move all the"
            " same",
            lambda p: p.rests_below("parameters", "optimizer"),
        ),
    ),
)  # fmt: skip
