"""APOLLO: gradients scaled column by column, by factors that are found in a random subspace.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", 2024 (arXiv 2412.05270). AdamW runs
on a random projection of the gradient and is asked for nothing but how much longer it makes each
column; the whole gradient is scaled by that. Random numbers are drawn anew where they are needed,
so that there is no projector to keep: two moments of K N numbers for a matrix of M by N. How fast
updates may grow is bounded.

    optimizer: {name: apollo}
    apollo: {rank: 1, scaling: matrix, scale: 11.3}     # APOLLO-Mini: one factor for a matrix
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec, subspace
from outsize.optim.optimizer import AdamW, Rates
from outsize.registry import setting, technique

NAME = "apollo"
_LENGTH = "length"


@dataclass(frozen=True)
class Settings:
    rank: int | None = setting(
        None, "of the subspace; open: a quarter of a matrix's shorter side", 1
    )
    gap: int = setting(200, "updates for which a subspace stays", 1)
    scaling: Literal["column", "matrix"] = setting("column", "what has a factor of its own")
    scale: float = setting(1.0, "factor on the learning rate of matrices", 0)
    growth: float = setting(1.01, "how much longer a step may become from update to update", 1)


@dataclass(frozen=True)
class Apollo(subspace.Subspaced):
    """lr, betas, eps and weight_decay are those of `rest`, the AdamW of all other parameters."""

    rest: AdamW = field(default_factory=AdamW)
    settings: Settings = field(default_factory=Settings)
    approximate: ClassVar[str] = NAME

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (*self.moments, StateSpec(_LENGTH, size=subspace.one))

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        own = self.settings
        start = subspace.correction(self.rest, rates.step)
        drawn = (rates.step - 1) // own.gap
        dim = 0 if own.scaling == "column" else None
        for matrix in subspace.matrices(weights, gradients, state, rates.name):
            g_MN, rank = matrix.gradient_MN, len(matrix.moments[0])
            r_MK = subspace.gaussian(g_MN, rank, f"{matrix.name}.{drawn}")
            low_KN = r_MK.T @ g_MN
            towards_KN = subspace.adam(matrix, low_KN, self.rest) * start
            scaled_MN = g_MN * subspace.ratio(towards_KN, low_KN, dim)
            last = matrix.states[_LENGTH]
            scaled_MN = subspace.growing(scaled_MN, last, own.growth, rates.step == 1)
            matrix.move(scaled_MN, rates.lr * own.scale, rates.lr * rates.weight_decay)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return Apollo(common.adamw(), settings or Settings())


technique(
    NAME,
    Settings,
    "gradients scaled by factors found in a random subspace (arXiv 2412.05270)",
    exact=False,
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
