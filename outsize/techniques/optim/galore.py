"""GaLore: AdamW in the subspace of each matrix's leading singular vectors.

Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024 (arXiv
2403.03507). A matrix of M by N (M shorter) keeps a projector of M K and two moments of K N numbers
in place of 2 M N. What of a gradient is not in the subspace is lost. Moments stay when the
subspace changes. As the authors' code; but weights decay before the update, as in
torch.optim.AdamW, and each of a stack of experts' matrices has a subspace of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec, subspace
from outsize.optim.optimizer import AdamW, Rates
from outsize.registry import setting, technique

NAME = "galore"


@dataclass(frozen=True)
class Settings:
    rank: int | None = setting(
        None, "of the subspace; open: a quarter of a matrix's shorter side", 1
    )
    gap: int = setting(200, "updates for which a subspace stays", 1)
    scale: float = setting(0.25, "factor on the learning rate of matrices", 0)


@dataclass(frozen=True)
class GaLore(subspace.Subspaced):
    """lr, betas, eps and weight_decay are those of `rest`, the AdamW of all other parameters."""

    rest: AdamW = field(default_factory=AdamW)
    settings: Settings = field(default_factory=Settings)
    approximate: ClassVar[str] = NAME

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (self.projector, *self.moments)

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        own, rate = self.settings, rates.lr * subspace.correction(self.rest, rates.step)
        for matrix in subspace.matrices(weights, gradients, state, rates.name):
            p_MK, g_MN = matrix.projector, matrix.gradient_MN
            if subspace.begins(rates.step, own.gap):
                p_MK.copy_(subspace.leading(g_MN, p_MK.shape[1]))
            towards_KN = subspace.adam(matrix, p_MK.T @ g_MN, self.rest)
            matrix.move(p_MK @ towards_KN, rate * own.scale, rates.lr * rates.weight_decay)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return GaLore(common.adamw(), settings or Settings())


technique(
    NAME,
    Settings,
    "AdamW in the subspace of leading singular vectors (arXiv 2403.03507)",
    exact=False,
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
