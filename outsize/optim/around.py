"""An optimizer around another one, with one state more beside the other's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outsize.optim.declared import StateSpec
from outsize.optim.optimizer import Optimizer


@dataclass(frozen=True)
class Around:
    """What is the inner one's. EXTRA: the name of the state that comes on top; `rest` and `update`
    are for whoever is built on this."""

    inner: Optimizer
    EXTRA: ClassVar[str]

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

    def takes(self, shape: tuple[int, ...]) -> bool:
        return self.inner.takes(shape)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (*self.inner.states, StateSpec(self.EXTRA))
