"""An optimizer that keeps the gradients it is given, as one state more beside its own.

States are put together from all workers by whoever saves checkpoints, so gradients come out whole,
by name, as they were at the update: after every sum, the one scale and clipping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outsize.optim import Optimizer, StateSpec
from outsize.optim.optimizer import Rates

GRADIENT = "gradient"


@dataclass(frozen=True)
class Kept:
    """`inner`, with the state "gradient"."""

    inner: Optimizer

    @property
    def lr(self) -> float:
        return self.inner.lr

    @property
    def weight_decay(self) -> float:
        return self.inner.weight_decay

    @property
    def grain(self) -> int:
        return self.inner.grain

    @property
    def approximate(self) -> str | None:
        return self.inner.approximate

    @property
    def rest(self) -> Optimizer | None:
        return None if self.inner.rest is None else Kept(self.inner.rest)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (*self.inner.states, StateSpec(GRADIENT))

    def takes(self, shape: tuple[int, ...]) -> bool:
        return self.inner.takes(shape)

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        state[GRADIENT].copy_(gradients)
        self.inner.update(weights, gradients, state, rates)
