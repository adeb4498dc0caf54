"""Adafactor: of a matrix's squared gradients the means of rows and of columns are kept alone.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018 (arXiv
1804.04235), as torch.optim.Adafactor: no momentum, steps relative to the size of the weights, and
clipped by their own size. R + C numbers for a matrix of R rows and C columns; vectors have one
each. Every parameter is updated as a whole. The learning rate is the largest relative step: 0.01
is usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from outsize.optim import OPTIMIZERS, Common, Optimizer, StateSpec
from outsize.optim.declared import WHOLE, check_numbers
from outsize.optim.optimizer import OfAll, Rates
from outsize.optim.parse import RATES
from outsize.registry import setting, technique

NAME = "adafactor"
_ROWS, _COLUMNS, _EACH = "row_var", "col_var", "variance"


@dataclass(frozen=True)
class Settings:
    decay: float = setting(-0.8, "power of the step, the share of new squares in a mean", most=0)
    clip: float = setting(1.0, "root mean square of a step, before the learning rate", least=1)
    least: float = setting(1e-3, "size of weights that steps are relative to, at least", least=0)


def rows(shape: tuple[int, ...]) -> int:
    """Means of rows: of every matrix its rows."""
    return prod(shape[:-1]) if len(shape) > 1 else 0


def columns(shape: tuple[int, ...]) -> int:
    return prod((*shape[:-2], shape[-1])) if len(shape) > 1 else 0


def each(shape: tuple[int, ...]) -> int:
    return 0 if len(shape) > 1 else prod(shape)


@dataclass(frozen=True)
class Adafactor(OfAll):
    """lr: largest relative step; weight_decay: decoupled, a fraction of lr."""

    lr: float = 1e-2
    weight_decay: float = 0.0
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        check_numbers(lr=self.lr, weight_decay=self.weight_decay)

    grain: ClassVar[int] = WHOLE

    @property
    def states(self) -> tuple[StateSpec, ...]:
        sizes = {_ROWS: rows, _COLUMNS: columns, _EACH: each}
        return tuple(StateSpec(name, size=size) for name, size in sizes.items())

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        own, floor = self.settings, torch.finfo(weights.dtype).eps
        g = gradients.to(state[_EACH].dtype)
        wide = weights.to(g.dtype)
        size = (wide.norm() / sqrt(wide.numel())).clamp_(min=own.least)
        step = size * min(rates.lr, 1 / sqrt(rates.step))
        square = self._square(g, state, float(rates.step) ** own.decay, floor)
        towards = square.clamp_(min=floor**2).rsqrt_().mul_(g)
        over = (towards.norm() / (sqrt(towards.numel()) * own.clip)).clamp_(min=1.0)
        weights.mul_(1 - rates.lr * rates.weight_decay)
        weights.sub_(towards.mul_(step / over).to(weights.dtype))

    def _square(self, g: Tensor, state: Mapping[str, Tensor], share: float, floor: float) -> Tensor:
        """What stands for the mean of squared gradients, in their shape; moves the means."""
        if g.ndim < 2:
            return state[_EACH].view(g.shape).lerp_(g.square(), share).clone()
        row = state[_ROWS].view(*g.shape[:-1], 1).lerp_(g.square().mean(-1, keepdim=True), share)
        column = state[_COLUMNS].view(*g.shape[:-2], 1, g.shape[-1])
        column.lerp_(g.square().mean(-2, keepdim=True), share)
        return (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=floor))


def _make(common: Common, settings: Settings | None) -> Optimizer:
    return Adafactor(common.lr, common.weight_decay, settings or Settings())


technique(
    NAME,
    Settings,
    "settings of optimizer.name: adafactor (arXiv 1804.04235)",
    touches=frozenset({"optimizer states"}),
)
OPTIMIZERS.add(NAME, _make)
RATES.add(NAME, lambda _: 1e-2)
