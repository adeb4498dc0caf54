"""An RMS norm over a vector whose parts lie on several workers.

The mean square is of the whole vector, and so is the sum that its derivative needs: one number a
token is summed over the axis forward, one back.

T tokens, D the part of the vector that is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective
from outsize.models.norm import Norm, upcast


def wide_norm(norm: Norm, x_TD: Tensor, axis: Collective, copies: int) -> Tensor:
    """x_TD over the root of the mean square of the whole vector, times the weight; dtype as x.

    copies: workers that hold the same part. Their gradients of it are summands.
    """
    facts = norm.facts
    assert facts.kind == "rms" and norm.weight is not None, "a norm over all heads is an RMS norm"
    offset = 1.0 - facts.unit
    y: Tensor = _WideNorm.apply(x_TD, norm.weight, facts.eps, offset, norm.size, (axis, copies))  # type: ignore[no-untyped-call]
    return y


class _WideNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        offset: float,
        size: int,
        where: tuple[Collective, int],
    ) -> Tensor:
        axis, copies = where
        h_TD = upcast(x_TD)
        square_T1 = axis.all_reduce(h_TD.square().sum(-1, keepdim=True))
        inverse_T1 = square_T1.div_(size * copies).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, inverse_T1)
        ctx.facts = (offset, size, where)
        return (h_TD * inverse_T1).mul_(upcast(weight_D) + offset).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, gy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D, inverse_T1 = ctx.saved_tensors
        offset, size, (axis, copies) = ctx.facts
        unit_TD, g_TD = upcast(x_TD) * inverse_T1, upcast(gy_TD)
        gweight_D = (g_TD * unit_TD).sum(0).to(weight_D.dtype)
        g_TD = g_TD * (upcast(weight_D) + offset)
        # Copies hold summands of g: their sum over the axis is whole, and each takes its share.
        along_T1 = axis.all_reduce((g_TD * unit_TD).sum(-1, keepdim=True)).div_(size * copies)
        gx_TD = g_TD.sub_(unit_TD.mul_(along_T1)).mul_(inverse_T1).to(x_TD.dtype)
        return gx_TD, gweight_D, None, None, None, None
