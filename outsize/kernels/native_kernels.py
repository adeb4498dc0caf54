"""Triton kernels of the passes of native.cpp: each over memory once, in float32 arithmetic.

Imported where a device first runs one. Their plain twins are in norm.py, rope.py, gate.py and
entropy.py, beside what calls them. No sum depends on the order in which programs end.

D normalised size, T tokens, H heads, K head size, P pairs, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from outsize.kernels.entropy import IGNORE

_TILE = 2048  # elements that a program holds at once, or one row
_FLAT = tl.constexpr(1024)  # of what has no rows
_VOCABULARY = 4096  # logits at a time
_TALL, _NARROW = tl.constexpr(256), tl.constexpr(16)  # rows and columns of a weight's gradient
_IGNORE = tl.constexpr(IGNORE)
_LOWEST = tl.constexpr(-3.0e38)  # below every logit, and no infinity: the difference of two is none


def _power(x: int) -> int:
    """x or more, a power of two. What Triton has for it takes longer than a launch."""
    return 1 << max(0, x - 1).bit_length()


@cache
def _shape(size: int) -> tuple[int, int, int]:
    """For rows of so many elements: rows of a program, columns (a power of two), warps."""
    wide = _power(size)
    rows = max(1, _TILE // wide)
    return rows, wide, min(16, max(4, rows * wide // 1024))


# -- RMS norm --------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor, inverse: Tensor
) -> None:
    """y, and the inverse of the root of each row's mean square."""
    count, size = inverse.numel(), weight.numel()
    rows, wide, warps = _shape(size)
    _norm[(-(-count // rows),)](
        x, weight, y, inverse, count, size, eps, offset, rows, wide, num_warps=warps
    )


def rms_norm_backward(
    rows: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    offset: float,
    gx: Tensor | None,
    gweight: Tensor | None,
) -> None:
    """Those gradients that are not None. rows: gy, x and the inverse."""
    count, size = rows[2].numel(), weight.numel()
    each, wide, warps = _shape(size)
    programs = 0 if gx is None else -(-count // each)
    programs += 0 if gweight is None else -(-size // _NARROW.value)
    _norm_backward[(programs,)](
        *rows, weight, gx, gweight, (count, size), offset, each, wide, num_warps=warps
    )


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, weight, y, inverse, count, size, eps, offset, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    there = (row < count)[:, None] & (d < size)[None, :]
    at = row.to(tl.int64)[:, None] * size + d[None, :]
    h = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32) + offset
    factor = tl.math.rsqrt(tl.sum(h * h, 1) / size + eps)
    tl.store(inverse + row, factor, mask=row < count)
    made = h * factor[:, None] * scale[None, :]
    tl.store(y + at, made.to(y.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    gy, x, inverse, weight, gx, gweight, sizes, offset, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """Programs of the weight's columns, which take longest, and behind them those of rows."""
    mine = tl.program_id(0)
    if gweight is not None:
        columns = tl.cdiv(sizes[1], _NARROW)
        if mine < columns:
            _norm_columns(gy, x, inverse, gweight, sizes, mine)
        else:
            if gx is not None:
                _norm_rows(gy, x, inverse, weight, gx, sizes, offset, mine - columns, ROWS, WIDE)
    else:
        _norm_rows(gy, x, inverse, weight, gx, sizes, offset, mine, ROWS, WIDE)


@triton.jit
def _norm_columns(gy, x, inverse, gweight, sizes, mine):  # type: ignore[no-untyped-def]
    """The gradient of some elements of the weight, over all rows."""
    count, size = sizes
    d = mine * _NARROW + tl.arange(0, _NARROW)
    total = tl.zeros((_TALL, _NARROW), tl.float32)
    for first in range(0, count, _TALL):
        row = first + tl.arange(0, _TALL)
        there = (row < count)[:, None] & (d < size)[None, :]
        at = row.to(tl.int64)[:, None] * size + d[None, :]
        factor = tl.load(inverse + row, mask=row < count, other=0.0)
        unit = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * factor[:, None]
        total += tl.load(gy + at, mask=there, other=0.0).to(tl.float32) * unit
    tl.store(gweight + d, tl.sum(total, 0).to(gweight.dtype.element_ty), mask=d < size)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rows(  # type: ignore[no-untyped-def]
    gy, x, inverse, weight, gx, sizes, offset, mine, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    count, size = sizes
    row, d = mine * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    there = (row < count)[:, None] & (d < size)[None, :]
    at = row.to(tl.int64)[:, None] * size + d[None, :]
    factor = tl.load(inverse + row, mask=row < count, other=0.0)[:, None]
    scale = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32) + offset
    unit = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * factor
    g = tl.load(gy + at, mask=there, other=0.0).to(tl.float32) * scale[None, :]
    along = tl.sum(g * unit, 1) / size
    made = (g - unit * along[:, None]) * factor
    tl.store(gx + at, made.to(gx.dtype.element_ty), mask=there)


# -- rotary positions ------------------------------------------------------------------------------


def turn(
    x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool, sign: float, y_THK: Tensor
) -> None:
    """y, contiguous; what is in a head of x lies one behind another."""
    (tokens, heads, size), pairs = x_THK.shape, cos_TP.shape[1]
    wide, rest = _power(pairs), size - 2 * pairs
    each = min(_power(heads), max(1, _TILE // wide))
    _turn[(tokens, -(-heads // each))](
        x_THK, cos_TP, sin_TP, y_THK, (heads, size, pairs, *x_THK.stride()[:2]), sign,
        each, wide, _power(rest) if rest else 0, interleaved,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    x, cos, sin, y, sizes, sign,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads of a token. REST: features that are not turned, or more, a power of two."""
    heads, size, pairs, by_token, by_head = sizes
    t = tl.program_id(0).to(tl.int64)
    h, p = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PAIRS)
    of = x + t * by_token + h.to(tl.int64)[:, None] * by_head
    to = y + (t * heads + h)[:, None] * size
    there = (h < heads)[:, None] & (p < pairs)[None, :]
    if INTERLEAVED:
        first, second = 2 * p[None, :], 2 * p[None, :] + 1
    else:
        first, second = p[None, :], p[None, :] + pairs
    a = tl.load(of + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(of + second, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + t * pairs + p, mask=p < pairs, other=0.0)[None, :]
    s = tl.load(sin + t * pairs + p, mask=p < pairs, other=0.0)[None, :] * sign
    tl.store(to + first, (a * c - b * s).to(y.dtype.element_ty), mask=there)
    tl.store(to + second, (b * c + a * s).to(y.dtype.element_ty), mask=there)
    if REST > 0:
        k = 2 * pairs + tl.arange(0, REST)[None, :]
        there = (h < heads)[:, None] & (k < size)
        tl.store(to + k, tl.load(of + k, mask=there, other=0.0), mask=there)


# -- the gate of a feed-forward network ------------------------------------------------------------


def gate(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """y = SiLU(gate) times up."""
    count = gate.numel()
    _gate[(-(-count // _FLAT.value),)](gate, up, y, count)


def gate_backward(g: Tensor, gate: Tensor, up: Tensor, ggate: Tensor, gup: Tensor) -> None:
    """The gradients of gate and up."""
    count = gate.numel()
    _gate_backward[(-(-count // _FLAT.value),)](g, gate, up, ggate, gup, count)


@triton.jit
def _gate(gate, up, y, count):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * _FLAT + tl.arange(0, _FLAT)
    there = at < count
    x = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    made = x / (1.0 + tl.exp(-x)) * tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, made.to(y.dtype.element_ty), mask=there)


@triton.jit
def _gate_backward(g, gate, up, ggate, gup, count):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * _FLAT + tl.arange(0, _FLAT)
    there = at < count
    x = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    gy = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    wide = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-x))
    slope = share * (1.0 + x * (1.0 - share))
    tl.store(ggate + at, (gy * wide * slope).to(ggate.dtype.element_ty), mask=there)
    tl.store(gup + at, (gy * (x * share)).to(gup.dtype.element_ty), mask=there)


# -- cross-entropy ---------------------------------------------------------------------------------


def cross_entropy(
    logits_CV: Tensor,
    targets_C: Tensor,
    factor: float,
    gradient: bool,
    weights_C: Tensor | None,
    total: Tensor,
) -> None:
    """total = the losses' sum; with `gradient`, logits become their gradient. The host does not
    look: a target that is no token makes the sum NaN."""
    count, size = logits_CV.shape
    wide = min(_VOCABULARY, _power(size))
    losses_C = torch.empty(count, dtype=torch.float32, device=logits_CV.device)
    _cross_entropy[(count,)](
        logits_CV, targets_C, weights_C, losses_C, size, factor, gradient, wide,
        num_warps=max(1, wide // 512),
    )  # fmt: skip
    torch.sum(losses_C, 0, out=total)


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, targets, weights, losses, size, factor, GRADIENT: tl.constexpr, WIDE: tl.constexpr
):
    """A token: twice over its logits, the second time for the gradient. Each lane has a largest
    logit and a sum of its own till all are summed."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    here, v = logits + row * size, tl.arange(0, WIDE)
    if target == _IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, size, WIDE):
                zeros = tl.zeros((WIDE,), logits.dtype.element_ty)
                tl.store(here + first + v, zeros, mask=first + v < size)
    else:
        a_token = (target >= 0) & (target < size)
        picked = tl.load(here + target, mask=a_token, other=0.0).to(tl.float32)
        counted = tl.where(a_token, factor, float("nan"))
        if weights is not None:
            counted *= tl.load(weights + row)
        top, total = tl.full((WIDE,), _LOWEST, tl.float32), tl.zeros((WIDE,), tl.float32)
        for first in range(0, size, WIDE):
            z = tl.load(here + first + v, mask=first + v < size, other=-float("inf"))
            higher = tl.maximum(top, z.to(tl.float32))
            total = total * tl.exp(top - higher) + tl.exp(z.to(tl.float32) - higher)
            top = higher
        highest = tl.max(top, 0)
        sum = tl.sum(total * tl.exp(top - highest), 0)
        tl.store(losses + row, (tl.log(sum) - (picked - highest)) * counted)
        if GRADIENT:
            for first in range(0, size, WIDE):
                z = tl.load(here + first + v, mask=first + v < size, other=0.0).to(tl.float32)
                g = tl.exp(z - highest) * (counted / sum)
                g = tl.where(first + v == target, g - counted, g)
                tl.store(here + first + v, g.to(logits.dtype.element_ty), mask=first + v < size)
