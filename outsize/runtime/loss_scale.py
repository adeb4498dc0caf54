"""Loss scaling: small gradients of float16 are kept by computing them of a larger loss.

Micikevicius et al., "Mixed Precision Training", 2018. The factor is found as torch.amp.GradScaler
finds it: halved by a step whose gradient overflows, which changes no weight and no state, and
doubled behind so many steps without one. It is a power of two, so that scaling rounds nothing that
it does not bring below the least number of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from outsize.errors import Everywhere, OutsizeError

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # torch.amp.GradScaler's own
MOST = 2.0**127  # a power of two that float32 has
LEAST = 1.0  # an overflow without scaling is none that scaling made
NOTES = "loss scale"  # of a checkpoint


@dataclass(frozen=True)
class LossScale:
    """factor: of the next step's losses. steps: without an overflow since it was last changed.
    skipped: steps so far that changed nothing."""

    factor: float = FIRST
    steps: int = 0
    skipped: int = 0

    def after(self, norm: float) -> LossScale:
        """Behind a step whose gradient has a norm. OutsizeError for an overflow that no smaller
        factor mends; the weights were left unchanged."""
        if not isfinite(norm):
            if self.factor <= LEAST:
                raise Everywhere(
                    f"gradient norm is {norm} at this step at a loss scale of {self.factor:g};"
                    " expected a finite number: lower the learning rate, check the data, or set"
                    " precision to bfloat16; the weights were left unchanged"
                )
            return LossScale(self.factor * BACKOFF, 0, self.skipped + 1)
        if self.steps + 1 < INTERVAL:
            return replace(self, steps=self.steps + 1)
        return replace(self, factor=min(MOST, self.factor * GROWTH), steps=0)

    def notes(self) -> dict[str, float]:
        """Of a checkpoint."""
        return {"factor": self.factor, "steps": self.steps, "skipped": self.skipped}


def recalled(notes: Mapping[str, Any]) -> LossScale:
    """Of a checkpoint's notes, or the first one. OutsizeError for what is none."""
    if NOTES not in notes:
        return LossScale()
    found = notes[NOTES]
    kinds = {"factor": float, "steps": int, "skipped": int}
    if not isinstance(found, dict) or not all(
        type(found.get(name)) is kind for name, kind in kinds.items()
    ):
        raise OutsizeError(
            f"checkpoint: its {NOTES} is {found!r}; expected factor, steps and skipped, as a run in"
            " float16 saves them"
        )
    return LossScale(**found)
