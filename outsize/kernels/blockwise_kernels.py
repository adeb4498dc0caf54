"""The Triton kernel of 8-bit AdamW (blockwise.py, which has the plain twin).

Imported where a device first updates so. What the twin rounds after every operation is rounded
after every operation here too: roots and quotients are the exact ones, and no product and sum are
one, so that codes are those of the twin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TINY = tl.constexpr(2.0**-126)  # the least normal number of float32
_CODES = tl.constexpr(256)  # of a table


def update(
    weights: Tensor,
    gradients: Tensor,
    mean: tuple[Tensor, Tensor],
    square: tuple[Tensor, Tensor],
    tables: Tensor,
    block: int,
    numbers: list[float],
) -> None:
    """Update weights and moments (codes, scales) in place. tables: values of signed codes and of
    others, then the borders of both, float32. numbers: as Rates has them."""
    count, wide = weights.numel(), triton.next_power_of_2(block)
    _update[(triton.cdiv(count, block),)](
        weights, gradients, *mean, *square, tables, (count, block), tuple(numbers), wide,
        num_warps=min(8, max(1, wide // 256)), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, gradients, mean, mean_scale, square, square_scale, tables, sizes, numbers,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One block. WIDE: its elements or more, a power of two."""
    count, block = sizes
    keep, rate, one, rest_one, two, rest_two, root, eps = numbers
    mine = tl.program_id(0)
    at = tl.arange(0, WIDE)
    here = mine.to(tl.int64) * block + at
    there = (at < block) & (here < count)
    x = tl.load(gradients + here, mask=there, other=0.0).to(tl.float32)
    m = tl.load(tables + tl.load(mean + here, mask=there, other=0).to(tl.int32))
    v = tl.load(tables + _CODES + tl.load(square + here, mask=there, other=0).to(tl.int32))
    m = m * tl.load(mean_scale + mine) * one + x * rest_one
    v = v * tl.load(square_scale + mine) * two + x * x * rest_two
    step = tl.math.div_rn(m, tl.math.sqrt_rn(v) * root + eps) * rate
    w = tl.load(weights + here, mask=there, other=0.0).to(tl.float32) * keep - step
    tl.store(weights + here, w.to(weights.dtype.element_ty), mask=there)
    borders = tables + 2 * _CODES
    _round(tl.where(there, m, 0.0), mean + here, mean_scale + mine, borders, there)
    _round(tl.where(there, v, 0.0), square + here, square_scale + mine, borders + _CODES, there)


@triton.jit
def _round(x, codes, scale, borders, there):  # type: ignore[no-untyped-def]
    """A block's codes and scale anew: a number's code is how many borders lie below it."""
    most = tl.max(tl.abs(x), 0)
    tl.store(scale, most)
    x = x * tl.math.div_rn(1.0, tl.maximum(most, _TINY))
    code = tl.zeros_like(x).to(tl.int32)
    for bit in tl.static_range(8):
        further = code + (128 >> bit)
        code = tl.where(tl.load(borders + further - 1) < x, further, code)
    tl.store(codes, code.to(tl.uint8), mask=there)
