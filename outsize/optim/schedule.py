"""Learning-rate schedules: warm-up, then constant, linear, cosine or warm-up-stable-decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from outsize.errors import OutsizeError, counted, nearest

Shape = Literal["constant", "linear", "cosine", "wsd"]
SHAPES: tuple[Shape, ...] = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class LearningRate:
    """The factor on the optimizer's lr by step.

    shape: what follows the linear warm-up of `warmup` steps, until `steps`. final: the factor at
    the end. decay: for "wsd" the share of all steps in which it falls linearly.
    """

    shape: Shape = "cosine"
    steps: int = 1000
    warmup: int = 0
    final: float = 0.1
    decay: float = 0.2

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise OutsizeError(f"schedule {self.shape!r} is not known{nearest(self.shape, SHAPES)}")
        if not 0 <= self.warmup <= self.steps:
            raise OutsizeError(
                f"schedule: warmup is {counted(self.warmup, 'step')}; expected 0 to steps,"
                f" {self.steps}"
            )

    def factor(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        if self.shape == "wsd":
            begin = max(self.warmup, round(self.steps * (1 - self.decay)))
            return self._between(step, begin)
        done = self._done(step, self.warmup)
        if self.shape == "linear":
            return 1 + (self.final - 1) * done
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))

    def _done(self, step: int, begin: int) -> float:
        return min(1.0, (step - begin) / max(1, self.steps - begin))

    def _between(self, step: int, begin: int) -> float:
        return 1.0 if step < begin else 1 + (self.final - 1) * self._done(step, begin)
