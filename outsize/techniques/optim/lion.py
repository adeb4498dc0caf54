"""Lion: every weight moves by the same distance, in the direction of a mean's sign.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023 (arXiv 2302.06675). One state
where AdamW has two. Its steps are larger than AdamW's: the paper takes a third to a tenth of the
learning rate, and as much more weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from outsize.kernels.pieces import pieces
from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec
from outsize.optim.declared import check_numbers
from outsize.optim.optimizer import OfAll, Rates
from outsize.optim.parse import RATES
from outsize.registry import setting, technique

NAME = "lion"
_MEAN = "exp_avg"


@dataclass(frozen=True)
class Settings:
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "what the direction, and what the mean, keep of the mean"
    )


@dataclass(frozen=True)
class Lion(OfAll):
    """lr: how far every weight moves; weight_decay: decoupled, a fraction of lr."""

    lr: float = 1e-4
    weight_decay: float = 0.1
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        check_numbers(lr=self.lr, betas=self.settings.betas, weight_decay=self.weight_decay)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec(_MEAN),)

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        towards, keeps = self.settings.betas
        flats = (weights, gradients, state[_MEAN])
        for w, g, mean in zip(*map(pieces, flats), strict=True):
            wide = g.to(mean.dtype)
            direction = mean.lerp(wide, 1 - towards).sign_().to(w.dtype)
            w.mul_(1 - rates.lr * rates.weight_decay).add_(direction, alpha=-rates.lr)
            mean.lerp_(wide, 1 - keeps)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return Lion(common.lr, common.weight_decay, settings or Settings())


technique(
    NAME,
    Settings,
    "settings of optimizer.name: lion (arXiv 2302.06675)",
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
RATES.add(NAME, lambda rate: float(f"{rate / 5:.3g}"))
