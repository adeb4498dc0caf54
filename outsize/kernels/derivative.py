"""Nonlinear functions that keep derivatives in 4 bits for the backward pass, and not their inputs.

Jin et al., "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", 2025.
The forward pass computes with whole numbers; only gradients see what was rounded. A derivative in
a known range has one grid, on which 0 and 1 lie: that of ReLU is exact. All else has a scale for
each GROUP numbers of a row. What is kept is integers, which no other rounding touches.

D features of a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels.gate import Activation, gated
from outsize.kernels.norm import upcast

GROUP = 64  # numbers that share a scale of 16 bits: 4.25 bits each
MOST = 7  # codes of a scaled number: -7 to 7
STEPS, LEAST = 12, -2  # of the grid: LEAST / STEPS to (LEAST + 15) / STEPS, -1/6 to 13/12


def packed(codes: Tensor) -> Tensor:
    """uint8 codes below 16 (..., 2 n) as (..., n) bytes."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(packed: Tensor) -> Tensor:
    """The twin of `packed`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def on_grid(x: Tensor) -> Tensor:
    """The nearest points of the grid, as packed codes; a row of odd length has one more. x is used
    up."""
    codes = x.mul_(STEPS).round_().sub_(LEAST).clamp_(0, 15).to(torch.uint8)
    return packed(_padded(codes, x.shape[-1] % 2))


def from_grid(codes: Tensor, like: Tensor) -> Tensor:
    """What `on_grid` kept, in the shape and dtype of `like`."""
    points = unpacked(codes)[..., : like.shape[-1]].to(like.dtype)
    return points.add_(LEAST).div_(STEPS)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """(packed codes, scales as the bits of bfloat16) of x (..., D), by groups of a row. x is used
    up."""
    last = x.shape[-1]
    size = min(GROUP, last + last % 2)
    groups = _padded(x, -last % size).unflatten(-1, (-1, size))
    most = torch.linalg.vector_norm(groups, math.inf, -1, keepdim=True)
    scales = most.div_(MOST).to(torch.bfloat16)
    safe = scales.to(x.dtype).clamp_(min=torch.finfo(torch.bfloat16).tiny)
    codes = groups.div_(safe).round_().clamp_(-MOST, MOST).add_(8).to(torch.uint8)
    return packed(codes), scales.view(torch.int16)


def _padded(x: Tensor, more: int) -> Tensor:
    return F.pad(x, (0, more)) if more else x


def unscaled(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    """What `scaled` kept, in the shape and dtype of `like`."""
    numbers = (
        unpacked(codes).to(like.dtype).sub_(8).mul_(scales.view(torch.bfloat16).to(like.dtype))
    )
    return numbers.flatten(-2)[..., : like.shape[-1]]


def activated(activation: Activation, x: Tensor) -> Tensor:
    """activation(x), whose derivative is kept on the grid."""
    if not torch.is_grad_enabled():
        return activation.forward(x)
    y: Tensor = _Activated.apply(x, activation)  # type: ignore[no-untyped-call]
    return y


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(on_grid(activation.backward(x.new_ones(()).expand_as(x), x)))
        return activation.forward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return from_grid(codes, g).mul_(g), None


def gate_kept(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, whose derivatives by both are kept by groups."""
    if not torch.is_grad_enabled():
        return gated(gate, up, activation)
    y: Tensor = _GateKept.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return y


class _GateKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        by_gate = scaled(activation.backward(up, gate))
        ctx.save_for_backward(*by_gate, *scaled(activation.forward(gate)))
        return gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, of_gate, up, of_up = ctx.saved_tensors
        return unscaled(gate, of_gate, g).mul_(g), unscaled(up, of_up, g).mul_(g), None


def norm_kept(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centred: bool
) -> Tensor:
    """The RMS norm of x (..., D), or (centred) its layer norm, times weight (D) + offset, plus
    bias (D); of x the normalised numbers are kept by groups. dtype as x."""
    y: Tensor = _NormKept.apply(x, weight, bias, eps, offset, centred)  # type: ignore[no-untyped-call]
    return y


class _NormKept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
        centred: bool,
    ) -> Tensor:  # fmt: skip
        h = upcast(x)
        h = h - h.mean(-1, keepdim=True) if centred else h
        inverse = h.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        unit = h * inverse
        y = unit.clone() if weight is None else unit * (upcast(weight) + offset)
        y = (y if bias is None else y.add_(upcast(bias))).to(x.dtype)
        whole = torch.int64 if inverse.dtype == torch.float64 else torch.int32
        ctx.save_for_backward(weight, inverse.view(whole), *scaled(unit))
        ctx.facts = offset, centred, inverse.dtype
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, inverse, codes, scales = ctx.saved_tensors
        (offset, centred, dtype), (_, want_weight, want_bias) = ctx.facts, ctx.needs_input_grad[:3]
        g, unit = gy.to(dtype), unscaled(codes, scales, gy.to(dtype))
        gweight = (g * unit).flatten(0, -2).sum(0).to(weight.dtype) if want_weight else None
        gbias = g.flatten(0, -2).sum(0).to(gy.dtype) if want_bias else None
        if weight is not None:
            g = g * (upcast(weight) + offset)
        gx = g - unit * (g * unit).mean(-1, keepdim=True)
        if centred:
            gx = gx - g.mean(-1, keepdim=True)
        return (gx * inverse.view(dtype)).to(gy.dtype), gweight, gbias, None, None, None
