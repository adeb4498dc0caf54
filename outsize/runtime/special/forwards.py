"""What a zeroth-order step is made of: its settings, and what holds for its passes.

A step updates every stage and then takes all microbatches through it twice, with either sign, while
its weights are present (outsize/runtime/special/zeroth.py plays it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.optim.declared import StateSpec
from outsize.optim.optimizer import OfAll, Rates

NAME = "zeroth-order"  # what `approximate` must name


@dataclass(frozen=True)
class Zeroth(OfAll):
    """An optimizer without gradients or states. lr: step size, a hundredth or less of what a
    gradient takes. epsilon: how far the two losses are taken from the weights. weight_decay: of
    matrices, decoupled. seed: of the directions."""

    lr: float = 1e-6
    epsilon: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0

    states: ClassVar[tuple[StateSpec, ...]] = ()
    approximate: ClassVar[str | None] = NAME

    def __post_init__(self) -> None:
        for name in ("lr", "epsilon"):
            value = getattr(self, name)
            if not value > 0 or not math.isfinite(value):
                raise OutsizeError(f"{NAME}: {name} is {value}; expected a positive number")

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        raise AssertionError("there are no gradients")


@contextmanager
def still(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and without changes to the running figures of norms."""
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
