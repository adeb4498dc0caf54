"""Products by a weight that is held as codes: decoded some rows at a time, and never kept.

The gradient is that of x alone: codes are frozen. What the backward pass needs is decoded again,
so that between the passes there are no bytes but the codes' own (Dettmers et al., "QLoRA", 2023,
section 3).

T tokens, I in, O out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from outsize.kernels import product

PIECE = 1 << 20  # weights that are decoded at a time
Decode = Callable[[int, int, torch.dtype], Tensor]  # rows [first, last) of the weight in a dtype


def linear(x: Tensor, sizes: tuple[int, int], decode: Decode) -> Tensor:
    """x (..., I) times a weight of sizes (O, I): (..., O)."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _forward(x, sizes, decode)
    y: Tensor = _Coded.apply(x, (sizes, decode))  # type: ignore[no-untyped-call]
    return y


class _Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: tuple[tuple[int, int], Decode]) -> Tensor:
        ctx.held = held
        return _forward(x, *held)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        sizes, decode = ctx.held
        gy_TO = gy.reshape(-1, sizes[0])
        gx_TI: Tensor | None = None
        for first, last in _pieces(sizes):
            weight, part = decode(first, last, gy.dtype), gy_TO[:, first:last]
            if gx_TI is None:
                gx_TI = product.product(part, weight)
            else:
                product.add_product(gx_TI, part, weight)
            del weight
        assert gx_TI is not None, "a weight has rows"
        return gx_TI.view(*gy.shape[:-1], sizes[1]), None


def _forward(x: Tensor, sizes: tuple[int, int], decode: Decode) -> Tensor:
    d_out, d_in = sizes
    parts = list(_pieces(sizes))
    if len(parts) == 1:
        return product.linear(x, decode(0, d_out, x.dtype), None)
    x_TI = x.reshape(-1, d_in)
    y_TO = x.new_empty(len(x_TI), d_out)
    for first, last in parts:
        y_TO[:, first:last] = product.linear(x_TI, decode(first, last, x.dtype), None)
    return y_TO.view(*x.shape[:-1], d_out)


def _pieces(sizes: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Runs of rows of PIECE weights at most, or of one row."""
    rows, wide = sizes
    step = max(1, PIECE // max(1, wide))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
