"""Moments in 8 bits that lie at the border of two codes are allowed either; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outsize.kernels.blockwise import table
from outsize.plan import Precision
from outsize.techniques.optim.adamw8bit import AdamW8Bit
from outsize.verify.rounding import Rounding
from outsize.verify.updates import NEAR, updater


def after_two(gradient: Tensor, seed: int) -> Tensor:
    """A weight after a gradient and one of zero: the second step finds what 8 bits have kept."""
    weight = nn.Parameter(torch.zeros(gradient.shape, dtype=torch.float64))
    rounding = Rounding(Precision.named("float32"), seed)
    update = updater(AdamW8Bit(), {"a": weight}, frozenset({"a"}), rounding)
    for grad in (gradient, torch.zeros_like(gradient)):
        weight.grad = grad
        update(1e-3)
    return weight.detach().flatten()


@pytest.mark.parametrize(
    ("away", "differs"), [(0.0, True), (0.5, True), (2.0, False), (1e4, False)]
)
@pytest.mark.parametrize("way", [-1, 1])
def test_borders_are_met_from_both_sides(away: float, differs: bool, way: int) -> None:
    """away: from the border, in parts of what rounding reaches."""
    values = table(True).values.double()
    border = (values[200] + values[201]) / 2
    gradient = torch.zeros(64, 64, dtype=torch.float64)
    gradient[0, 0], gradient[0, 1] = 1.0, border * (1 + way * away * NEAR)
    one, other = (after_two(gradient, seed) for seed in (0, 1))
    assert one[0] == other[0]
    assert bool(one[1] != other[1]) == differs
