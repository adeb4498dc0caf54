"""LISA: some layers, drawn at random, are trained at a time; embeddings and head always.

Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model
Fine-Tuning", 2024 (arXiv 2403.17919). All layers have the same chance, as in the paper's own runs.
outsize/runtime/special/sampled.py trains them.

    plan: {approximate: [lisa]}
    lisa: {count: 2, gap: 20}
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from outsize.errors import OutsizeError
from outsize.models.random import uniform
from outsize.registry import setting, technique
from outsize.techniques.badam import CLASHES

KEY = "lisa"


@dataclass(frozen=True)
class Lisa:
    """Of a run whose plan.approximate names it."""

    count: int = setting(2, "layers that are trained at a time", least=1)
    gap: int = setting(20, "steps until others are drawn", least=1)
    ends: ClassVar[bool] = True

    def layers(self, seed: int, turn: int, count: int) -> Collection[int]:
        """OutsizeError where no layer would ever be left alone."""
        if self.count >= count:
            raise OutsizeError(
                f"{KEY}.count is {self.count}, and the model has {count} layers, which would all be"
                f" trained in every step; expected fewer of them, or a plan without {KEY}"
            )
        order: list[int] = uniform(seed, f"{KEY}.{turn}", 0, count).argsort().tolist()
        return order[: self.count]


technique(
    KEY, Lisa, "settings of plan.approximate: [lisa]", exact=False,
    touches=frozenset({"the backward pass"}),
    method="outsize.runtime.special.sampled.Sampled",
    clashes=CLASHES,
)  # fmt: skip
