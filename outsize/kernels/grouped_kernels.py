"""Triton kernels of grouped products (grouped.py, which has the plain twin).

Imported where such a product is first asked for on a device: Triton comes with PyTorch there. How
many tiles of rows each weight needs is known on the device alone. So as many programs are launched
as there can be tiles, each looks up its own, and those that are over end at once.

N rows, E weights, I in, O out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of a tile: rows, columns, elements of what is summed over at a time. No tensor core multiplies
# float64 by way of Triton: its products are summed one by one, and all of a tile's at once.
_TILES = {torch.float64: (16, 16, 16), torch.float32: (64, 64, 32)}
_TILE = (64, 128, 32)


def product(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, y_NO: Tensor) -> None:
    """y = each row of x times its weight."""
    (rows, inner), (count, out, _) = x_NI.shape, weight_EOI.shape
    tile = _TILES.get(x_NI.dtype, _TILE)
    most = triton.cdiv(rows, tile[0]) + count  # tiles of rows: each weight has one that is not full
    _product[(most, triton.cdiv(out, tile[1]))](
        x_NI, weight_EOI, ends_E, y_NO, (count, out, inner, *weight_EOI.stride()),
        *tile, triton.next_power_of_2(count), _precision(x_NI),
    )  # fmt: skip


def add(total_EOI: Tensor, g_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> None:
    """total += by weight, the sum over its rows of g times x."""
    count, out, inner = total_EOI.shape
    tile = _TILES.get(x_NI.dtype, _TILE)
    _add[(count, triton.cdiv(out, tile[1]), triton.cdiv(inner, tile[0]))](
        total_EOI, g_NO, x_NI, ends_E, (out, inner), *tile, _precision(x_NI)
    )


def _precision(x: Tensor) -> str:
    """How products are made: "wide" of float64; else as PyTorch multiplies float32, in TF32 where a
    user allows that."""
    if x.dtype == torch.float64:
        return "wide"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, total, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + a @ b"""
    if PRECISION == "wide":
        total += tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, weight, ends, y, sizes,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, MOST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of y. sizes: E, O, I, and the weight's steps by dim; MOST: weights or more, a power of
    two."""
    count, out, inner, step_e, step_o, step_i = sizes
    every = tl.arange(0, MOST)
    last = tl.load(ends + every, mask=every < count, other=0)
    first = tl.load(ends + every - 1, mask=(every > 0) & (every < count), other=0)
    tiles = tl.where(every < count, (last - first + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    mine = tl.program_id(0)
    e = tl.sum((upto <= mine).to(tl.int32), 0)  # those whose tiles all come before this one
    if e < count:
        here = every == e
        tile = mine - tl.sum(tl.where(here, upto - tiles, 0), 0)
        end = tl.sum(tl.where(here, last, 0), 0)
        n = tl.sum(tl.where(here, first, 0), 0) + tile * ROWS + tl.arange(0, ROWS)
        o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there_n, there_o = n < end, o < out
        a = x + n.to(tl.int64)[:, None] * inner
        b = weight + e.to(tl.int64) * step_e + o.to(tl.int64)[None, :] * step_o
        total = tl.zeros((ROWS, COLUMNS), tl.float64 if PRECISION == "wide" else tl.float32)
        for at in range(0, inner, INNER):
            i = at + tl.arange(0, INNER)
            there_i = i < inner
            a_NI = tl.load(a + i[None, :], mask=there_n[:, None] & there_i[None, :], other=0.0)
            b_IO = tl.load(
                b + i.to(tl.int64)[:, None] * step_i,
                mask=there_i[:, None] & there_o[None, :],
                other=0.0,
            )
            total = _multiply(a_NI, b_IO, total, PRECISION)
        to = y + n.to(tl.int64)[:, None] * out + o[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=there_n[:, None] & there_o[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    to, g, x, ends, sizes,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of one weight's sum. sizes: O, I."""
    out, inner = sizes
    e = tl.program_id(0)
    end = tl.load(ends + e)
    first = tl.load(ends + e - 1, mask=e > 0, other=0)
    o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.program_id(2) * INNER + tl.arange(0, INNER)
    there_o, there_i = o < out, i < inner
    total = tl.zeros((COLUMNS, INNER), tl.float64 if PRECISION == "wide" else tl.float32)
    for at in range(first, end, ROWS):
        n = (at + tl.arange(0, ROWS)).to(tl.int64)
        there_n = n < end
        g_ON = tl.load(
            g + n[None, :] * out + o[:, None], mask=there_n[None, :] & there_o[:, None], other=0.0
        )
        x_NI = tl.load(
            x + n[:, None] * inner + i[None, :], mask=there_n[:, None] & there_i[None, :], other=0.0
        )
        total = _multiply(g_ON, x_NI, total, PRECISION)
    here = to + e.to(tl.int64) * out * inner + o.to(tl.int64)[:, None] * inner + i[None, :]
    there = there_o[:, None] & there_i[None, :]
    total += tl.load(here, mask=there, other=0.0).to(total.dtype)
    tl.store(here, total.to(to.dtype.element_ty), mask=there)
