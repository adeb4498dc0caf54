"""The turn of rotary position embedding (Su et al., RoFormer, 2021).

The gradient of a turn is the turn back, so that nothing but the tables is kept.

T tokens, H heads, K head size, P pairs of rotated features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.norm import upcast
from outsize.torch_private import enter


def turn(x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool) -> Tensor:
    """x_THK with its first 2P features turned by their angles; contiguous, dtype as x.

    Pairs are features p and p + P, or interleaved 2p and 2p + 1.
    """
    if not torch.is_grad_enabled():
        return _turned(x_THK, cos_TP, sin_TP, interleaved, 1.0)
    y: Tensor = enter(_Turn, x_THK, cos_TP, sin_TP, interleaved)
    return y


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gy, cos, sin, ctx.interleaved, -1.0), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    y: Tensor
    if _fused(x, cos, sin):
        made = _run if native.bare(x) else torch.ops.outsize.turn.default
        y = made(x, cos, sin, interleaved, sign)
    else:
        y = plain(x, cos, sin, interleaved, sign)
    return y


def _fused(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Heads may lie apart, as a gradient of attention's does; what is in a head may not."""
    return (
        x.dim() == 3
        and x.stride(2) == 1
        and x.size(0) == cos.size(0)
        and x.size(2) >= 2 * cos.size(1)
        and native.served(x, by="turn")
        and cos.dtype == torch.float32
        and native.alike(cos, sin, by="turn")
    )


def plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    """The angles times `sign`: the twin of outsize_rope."""
    pairs = cos.shape[-1]
    y, wide = torch.empty_like(x, memory_format=torch.contiguous_format), upcast(x)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b = wide[..., first], wide[..., second]
    y[..., first] = (a * cos).addcmul_(b, sin, value=-sign)
    y[..., second] = (b * cos).addcmul_(a, sin, value=sign)
    y[..., 2 * pairs :] = x[..., 2 * pairs :]
    return y


def _allocate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    y = _allocate(x, cos, sin, interleaved, sign)
    shape, strides, pairs = native.numbers(x.shape), native.numbers(x.stride()), cos.size(-1)
    native.loaded().outsize_rope(
        *(native.CODES[x.dtype], x.data_ptr(), strides, cos.data_ptr(), sin.data_ptr(), pairs),
        *(y.data_ptr(), shape, pairs, interleaved, sign, native.threads()),
    )
    return y


def _run_there(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    y = _allocate(x, cos, sin, interleaved, sign)
    native.kernels().turn(x, cos, sin, interleaved, sign, y)
    return y


_OPERATORS = (
    native.define(
        "turn(Tensor x, Tensor cos, Tensor sin, bool interleaved, float sign) -> Tensor",
        _run,
        _allocate,
        _run_there,
    ),
)
