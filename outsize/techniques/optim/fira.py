"""Fira: GaLore, with what of a gradient is not in the subspace scaled as the part that is.

Chen et al., "Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?", 2024
(arXiv 2410.01623). AdamW makes each column of the gradient in the subspace longer by some factor;
the rest of that column is multiplied by the same. How fast that part may grow is bounded. As the
authors' code, but for weights that decay before the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec, subspace
from outsize.optim.optimizer import AdamW, Rates
from outsize.registry import setting, technique

NAME = "fira"
_LENGTH = "length"


@dataclass(frozen=True)
class Settings:
    rank: int | None = setting(
        None, "of the subspace; open: a quarter of a matrix's shorter side", 1
    )
    gap: int = setting(200, "updates for which a subspace stays", 1)
    growth: float = setting(1.01, "how much longer the rest may become from update to update", 1)


@dataclass(frozen=True)
class Fira(subspace.Subspaced):
    """lr, betas, eps and weight_decay are those of `rest`, the AdamW of all other parameters."""

    rest: AdamW = field(default_factory=AdamW)
    settings: Settings = field(default_factory=Settings)
    approximate: ClassVar[str] = NAME

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (self.projector, *self.moments, StateSpec(_LENGTH, size=subspace.one))

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        own, rate = self.settings, rates.lr * subspace.correction(self.rest, rates.step)
        for matrix in subspace.matrices(weights, gradients, state, rates.name):
            p_MK, g_MN = matrix.projector, matrix.gradient_MN
            if subspace.begins(rates.step, own.gap):
                p_MK.copy_(subspace.leading(g_MN, p_MK.shape[1]))
            low_KN = p_MK.T @ g_MN
            towards_KN = subspace.adam(matrix, low_KN, self.rest)
            others_MN = (g_MN - p_MK @ low_KN) * subspace.ratio(towards_KN, low_KN, dim=0)
            last = matrix.states[_LENGTH]
            others_MN = subspace.growing(others_MN, last, own.growth, rates.step == 1)
            towards_MN = (p_MK @ towards_KN).add_(others_MN)
            matrix.move(towards_MN, rate, rates.lr * rates.weight_decay)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return Fira(common.adamw(), settings or Settings())


technique(
    NAME,
    Settings,
    "GaLore, with the rest of the gradient scaled as the subspace is (arXiv 2410.01623)",
    exact=False,
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
