"""Normalisation of the last dim, in float32 at least, keeping little for the backward.

RMS norm: Zhang and Sennrich, 2019. Layer norm: Ba et al., 2016. Composed operators would keep
several copies of the input for the backward; this keeps the input and one number a row.

D normalised size, N rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.config import NormFacts


def upcast(x: Tensor) -> Tensor:
    """Half precisions as float32; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        h = upcast(x)
        mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(h.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        y: Tensor = (h * inverse).mul_(upcast(weight) + offset)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        unit, g = upcast(x) * inverse, upcast(gy)
        gx = gweight = None
        if ctx.needs_input_grad[1]:
            gweight = (g * unit).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            g = g * (upcast(weight) + ctx.offset)
            along = (g * unit).mean(-1, keepdim=True)
            gx = g.sub_(unit.mul_(along)).mul_(inverse).to(x.dtype)
        return gx, gweight, None, None


class Norm(nn.Module):
    """x (..., D) -> (..., D), any float dtype; weight (D) [and bias (D) for a layer norm]."""

    def __init__(self, size: int, facts: NormFacts) -> None:
        super().__init__()
        self.facts = facts
        self.size = size
        with_bias = facts.affine and facts.kind == "layer"
        self.weight = nn.Parameter(torch.empty(size)) if facts.affine else None
        self.bias = nn.Parameter(torch.empty(size)) if with_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.facts.kind == "layer":
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.facts.eps)
        assert self.weight is not None, "an RMS norm has a weight"
        y: Tensor = _RMSNorm.apply(x, self.weight, self.facts.eps, 1.0 - self.facts.unit)  # type: ignore[no-untyped-call]
        return y
