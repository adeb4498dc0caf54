"""Sophia: a mean of gradients over an estimate of the Hessian's diagonal, each element clipped.

Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training",
2023 (arXiv 2305.14342), with the Gauss-Newton-Bartlett estimator (Sophia-G). In the first of every
`gap` steps the batch passes once more before the step, with labels drawn from what the model says
of each target; with g the gradient of the mean loss over these n labels,

    h = beta_2 h + (1 - beta_2) n g^2

and in each step, with the batch's own gradient, m = beta_1 m + (1 - beta_1) g and

    w = w - lr (decay w + clip(m / max(gamma h, epsilon), 1)).

m is of gradients that are clipped by their norm, as the run says; g of drawn labels is not. That
pass is a step's own list of actions, with an update of h alone at its end: it goes wherever steps
go. Its labels are a function of the seed, the step and the token's place in the batch.
outsize/runtime/special/curvature.py makes it.

    optimizer: {name: sophia}
    plan: {approximate: [sophia]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from outsize.kernels.pieces import pieces
from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec
from outsize.optim.declared import check_numbers
from outsize.optim.optimizer import OfAll, Rates
from outsize.registry import setting, technique

NAME = "sophia"
EPSILON = 1e-12
_MEAN, _CURVATURE = "exp_avg", "hessian"


@dataclass(frozen=True)
class Settings:
    betas: tuple[float, float] = setting(
        (0.96, 0.99), "what the means of gradients, and of the Hessian, keep of themselves"
    )
    gamma: float = setting(0.05, "factor of the Hessian, in proportion to steps not clipped", 0)
    gap: int = setting(10, "steps from one estimate of the Hessian to the next", 1)


@dataclass(frozen=True)
class Sophia(OfAll):
    """lr: how far a weight moves at most; weight_decay: decoupled, a fraction of lr."""

    lr: float = 3e-4
    weight_decay: float = 0.1
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        own = self.settings
        check_numbers(lr=self.lr, betas=own.betas, weight_decay=self.weight_decay, gamma=own.gamma)

    approximate: ClassVar[str | None] = NAME

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return StateSpec(_MEAN), StateSpec(_CURVATURE)

    @property
    def gap(self) -> int:
        return self.settings.gap

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        keeps, _ = self.settings.betas
        flats = (weights, gradients, state[_MEAN], state[_CURVATURE])
        for w, g, mean, curvature in zip(*map(pieces, flats), strict=True):
            mean.lerp_(g.to(mean.dtype), 1 - keeps)
            under = (curvature * self.settings.gamma).clamp_(min=EPSILON)
            direction = (mean / under).clamp_(-1, 1).to(w.dtype)
            w.mul_(1 - rates.lr * rates.weight_decay).add_(direction, alpha=-rates.lr)

    def estimate(self, gradients: Tensor, state: Mapping[str, Tensor], count: float) -> None:
        """Take up the gradient of the mean loss over so many drawn labels, 1-D."""
        _, keeps = self.settings.betas
        for g, curvature in zip(*map(pieces, (gradients, state[_CURVATURE])), strict=True):
            wide = g.to(curvature.dtype)
            curvature.mul_(keeps).addcmul_(wide, wide, value=(1 - keeps) * count)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return Sophia(common.lr, common.weight_decay, settings or Settings())


technique(
    NAME, Settings, "settings of optimizer.name: sophia (arXiv 2305.14342)", exact=False,
    touches=frozenset({"optimizer states", "the backward pass"}),
    method="outsize.runtime.special.curvature.Curvature",
    clashes=(
        (
            "precision float16: its losses are scaled, and squares of gradients with them",
            lambda p: p.precision.scaled,
        ),
        (
            "ends that a pipeline's workers share: labels are drawn of whole ones alone",
            lambda p: p.pipeline.ends is not None,
        ),
    ),
)  # fmt: skip
OPTIMIZERS.add(NAME, _make)
