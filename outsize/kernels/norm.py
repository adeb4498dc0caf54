"""RMS norm (Zhang and Sennrich, 2019), in float32 at least, keeping little for the backward.

Composed operators would keep several copies of the input; this keeps the input and one number a
row.

D normalised size, N rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.rows import lying
from outsize.torch_private import enter


def upcast(x: Tensor) -> Tensor:
    """Half precisions as float32; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x (..., D) over the root of its mean square, times weight (D) + offset; dtype as x."""
    y: Tensor
    x = lying(x)
    if torch.is_grad_enabled():
        y = enter(_RMSNorm, x, weight, eps, offset)
    else:
        y, _ = _normed(x, weight, eps, offset)
    return y


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """y, and the inverse of the root."""
    if not _fused("rms_norm", weight, x):
        return plain(x, weight, eps, offset)
    made = _run if native.bare(x) else torch.ops.outsize.rms_norm.default
    y, inverse = made(x, weight, eps, offset)
    return y, inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y, inverse = _normed(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if not _fused("rms_norm_backward", weight, x, gy):
            return *plain_backward(gy, x, weight, inverse, ctx.offset, *wanted), None, None
        fused = torch.ops.outsize.rms_norm_backward.default
        backward = _run_backward if native.bare(gy) else fused
        gx, gweight = backward(gy, x, weight, inverse, ctx.offset, *wanted)
        return gx if wanted[0] else None, gweight if wanted[1] else None, None, None


def _fused(by: str, weight: Tensor, *rows: Tensor) -> bool:
    """A weight may be wider than what it scales."""
    shaped = weight.dim() == 1 and rows[0].size(-1) == weight.size(0)
    return shaped and native.fits(weight, by=by) and native.alike(*rows, by=by)


def plain(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(y, inverse (..., 1) of the root mean square): the twin of outsize_rms_norm."""
    h = upcast(x)
    mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(h.shape[-1])
    inverse = mean_square.add_(eps).rsqrt_()
    return (h * inverse).mul_(upcast(weight) + offset).to(x.dtype), inverse


def plain_backward(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    offset: float,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(gx, gweight), those that are wanted: the twin of outsize_rms_norm_backward."""
    unit, g = upcast(x) * inverse, upcast(gy)
    gx = gweight = None
    if want_weight:
        gweight = (g * unit).flatten(0, -2).sum(0).to(weight.dtype)
    if want_x:
        g = g * (upcast(weight) + offset)
        along = (g * unit).mean(-1, keepdim=True)
        gx = g.sub_(unit.mul_(along)).mul_(inverse).to(x.dtype)
    return gx, gweight


def _allocate(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x), inverse


def _run(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, inverse = _allocate(x, weight, eps, offset)
    native.loaded().outsize_rms_norm(
        *(native.CODES[x.dtype], native.CODES[weight.dtype]),
        *(x.data_ptr(), weight.data_ptr(), eps, offset, y.data_ptr(), inverse.data_ptr()),
        *(inverse.numel(), weight.numel(), native.threads()),
    )
    return y, inverse


def _run_there(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, inverse = _allocate(x, weight, eps, offset)
    native.kernels().rms_norm(x, weight, eps, offset, y, inverse)
    return y, inverse


def _allocate_backward(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    offset: float,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """What is not wanted is empty."""
    return (
        torch.empty_like(x) if want_x else x.new_empty(0),
        torch.empty_like(weight) if want_weight else weight.new_empty(0),
    )


def _run_backward(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    offset: float,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    gx, gweight = _allocate_backward(gy, x, weight, inverse, offset, want_x, want_weight)
    native.loaded().outsize_rms_norm_backward(
        *(native.CODES[x.dtype], native.CODES[weight.dtype]),
        *(gy.data_ptr(), x.data_ptr(), weight.data_ptr(), inverse.data_ptr(), offset),
        gx.data_ptr() if want_x else None,
        gweight.data_ptr() if want_weight else None,
        *(inverse.numel(), weight.numel(), native.threads()),
    )
    return gx, gweight


def _run_backward_there(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    offset: float,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    gx, gweight = _allocate_backward(gy, x, weight, inverse, offset, want_x, want_weight)
    wanted = (gx if want_x else None, gweight if want_weight else None)
    native.kernels().rms_norm_backward((gy, x, inverse), weight, offset, *wanted)
    return gx, gweight


_OPERATORS = (
    native.define(
        "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
        _run,
        _allocate,
        _run_there,
    ),
    native.define(
        "rms_norm_backward(Tensor gy, Tensor x, Tensor weight, Tensor inverse, float offset,"
        " bool want_x, bool want_weight) -> (Tensor, Tensor)",
        _run_backward,
        _allocate_backward,
        _run_backward_there,
    ),
)
