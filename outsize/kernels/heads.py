"""Products of each head by a matrix of its own: heads.cpp where each token is computed alone.

T tokens, H heads, I in, O out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.kernels import native, rows


def by_head(x_THI: Tensor, weight: Tensor, turns: bool) -> Tensor:
    """y_THO of a weight (H, O, I), or where it turns (H, I, O); its bits as those of rows.py."""
    y_THO: Tensor = _ByHead.apply(x_THI, weight, turns)  # type: ignore[no-untyped-call]
    return y_THO


class _ByHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THI: Tensor, weight: Tensor, turns: bool) -> Tensor:
        ctx.save_for_backward(x_THI, weight)
        ctx.turns = turns
        alike = x_THI.dtype is weight.dtype and weight.stride()[1:] == (weight.shape[2], 1)
        if not (rows.here() and alike and native.served(x_THI, weight)):
            return _plain(x_THI, weight, turns)
        x_HTI = x_THI.transpose(0, 1).contiguous()
        y_HTO: Tensor = torch.ops.outsize.heads_product.default(x_HTI, weight, turns)
        return y_HTO.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy_THO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_THI, weight = ctx.saved_tensors
        gx = _plain(gy_THO, weight, not ctx.turns) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return gx, None, None
        left, right = (x_THI, gy_THO) if ctx.turns else (gy_THO, x_THI)
        return gx, left.permute(1, 2, 0) @ right.transpose(0, 1), None


def _plain(x_THI: Tensor, weight: Tensor, turns: bool) -> Tensor:
    y_HTO = x_THI.transpose(0, 1) @ (weight if turns else weight.mT)
    return y_HTO.transpose(0, 1)


def _allocate(x_HTI: Tensor, weight: Tensor, turns: bool) -> Tensor:
    return x_HTI.new_empty((*x_HTI.shape[:2], weight.shape[2 if turns else 1]))


def _run(x_HTI: Tensor, weight: Tensor, turns: bool) -> Tensor:
    y_HTO = _allocate(x_HTI, weight, turns)
    heads, tokens, inner = x_HTI.shape
    native.serving(x_HTI.dtype).outsize_heads_product(
        *(turns, x_HTI.data_ptr(), weight.data_ptr(), weight.stride(0), y_HTO.data_ptr()),
        *(heads, tokens, inner, y_HTO.shape[2], native.threads()),
    )
    return y_HTO


_PRODUCT = native.define(
    "heads_product(Tensor x, Tensor weight, bool turns) -> Tensor", _run, _allocate
)
