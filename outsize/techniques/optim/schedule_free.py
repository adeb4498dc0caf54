"""Schedule-free AdamW: gradients are taken between the iterates and their average, which is the
model; no learning rate has to fall.

Defazio et al., "The Road Less Scheduled", 2024 (arXiv 2405.15682), as the authors' package
(schedule_free, AdamWScheduleFree). x is the average of the iterates z, and gradients are taken at
y = (1 - beta) z + beta x, where AdamW has a first moment. What is updated, evaluated and saved is
x; the state that AdamW's first moment has the place of is z - x.

The weight of an iterate in the average is the square of the largest learning rate so far, which is
that of the warm-up and then constant in any run: what follows the warm-up is in no weight. As in
the package weights decay at y.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels.pieces import pieces
from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec
from outsize.optim.declared import check_numbers
from outsize.optim.optimizer import OfAll, Rates
from outsize.optim.parse import SCHEDULES
from outsize.registry import setting, technique

NAME = "schedule-free"
_AHEAD, _SQUARE = "ahead", "exp_avg_sq"


@dataclass(frozen=True)
class Settings:
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "the average's part in where gradients are taken; what the mean square keeps"
    )


@dataclass(frozen=True)
class ScheduleFree(OfAll):
    """lr: step size; weight_decay: a fraction of lr; warmup: steps in which the learning rates that
    a job is given rise evenly to the largest; eps: added to the denominator."""

    lr: float = 3e-4
    weight_decay: float = 0.1
    settings: Settings = field(default_factory=Settings)
    warmup: int = 0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        own = self.settings.betas
        check_numbers(lr=self.lr, betas=own, eps=self.eps, weight_decay=self.weight_decay)
        if self.warmup < 0:
            raise OutsizeError(f"optimizer: warmup is {self.warmup}; expected steps, 0 or more")

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return StateSpec(_AHEAD), StateSpec(_SQUARE)

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        beta, keeps = self.settings.betas
        start = 1 - keeps**rates.step
        share = share_of(rates.step, self.warmup)
        flats = (weights, gradients, state[_AHEAD], state[_SQUARE])
        for x, g, ahead, square in zip(*map(pieces, flats), strict=True):
            wide = g.to(square.dtype)
            square.mul_(keeps).addcmul_(wide, wide, value=1 - keeps)
            towards = (square / start).sqrt_().add_(self.eps).reciprocal_().mul_(wide)
            if rates.weight_decay:
                towards.add_(x.add(ahead, alpha=1 - beta), alpha=rates.weight_decay)
            ahead.sub_(towards, alpha=rates.lr)
            x.add_(ahead, alpha=share)
            ahead.mul_(1 - share)

    def taken_at(self, weights: Tensor, state: Mapping[str, Tensor], out: Tensor) -> None:
        """y = x + (1 - beta) (z - x)."""
        for x, ahead, y in zip(*map(pieces, (weights, state[_AHEAD], out)), strict=True):
            y.copy_(x.add(ahead, alpha=1 - self.settings.betas[0]))


def share_of(step: int, warmup: int) -> float:
    """The part of the average that an update has, counted from 1: its weight by the sum of all so
    far, where weights rise as the squares of 1 to `warmup` and stay."""
    if step <= warmup:
        return 6 * step / ((step + 1) * (2 * step + 1))
    risen = (warmup + 1) * (2 * warmup + 1) / (6 * warmup) if warmup else 0.0
    return 1 / (risen + step - warmup)


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return ScheduleFree(
        common.lr, common.weight_decay, settings or Settings(), warmup=common.warmup
    )


technique(
    NAME,
    Settings,
    "settings of optimizer.name: schedule-free (arXiv 2405.15682)",
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
SCHEDULES.add(NAME, ("constant", f"{NAME}: its average needs no decay"))
