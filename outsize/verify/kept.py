"""An optimizer that keeps the gradients it is given, as one state more beside its own.

States are put together from all workers by whoever saves checkpoints, so gradients come out whole,
by name, as they were at the update: after every sum, the one scale and clipping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outsize.optim import Optimizer
from outsize.optim.around import Around

GRADIENT = "gradient"


@dataclass(frozen=True)
class Kept(Around):
    """`inner`, with the state "gradient"."""

    EXTRA = GRADIENT

    @property
    def rest(self) -> Optimizer | None:
        return None if self.inner.rest is None else Kept(self.inner.rest)

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        state[GRADIENT].copy_(gradients)
        self.inner.update(weights, gradients, state, step, lr, weight_decay)
