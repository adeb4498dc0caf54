"""Triton kernels of attention over pages (paged.py, which has the plain twin).

T tokens, G key-value heads, R query heads of each, K and W head sizes, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outsize.kernels import paged

_LEAST = 16  # rows of a product of Triton's
_PIECE: tl.constexpr = tl.constexpr(paged.PIECE)
_CHUNK: tl.constexpr = tl.constexpr(64)  # tokens that are looked at together


def attend(
    q_THK: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: paged.Sights,
    window: int,
    facts: tuple[float, float],
    o_THW: Tensor,
) -> None:
    """o = each query over the tokens that it sees, in pieces. facts: scale, cap of scores or 0."""
    (tokens, heads, size), (_, page, groups, _) = q_THK.shape, keys.shape
    width, each, out = seen.tables_TP.shape[1], heads // groups, o_THW.shape[2]
    count = triton.cdiv(width * page, paged.PIECE)
    rows, wide = (triton.next_power_of_2(max(_LEAST, x)) for x in (each, max(size, out)))
    some = q_THK.new_empty((tokens, heads, count, out + 2), dtype=torch.float32)
    _part[(tokens, groups, count)](
        q_THK, keys, values, seen.tables_TP, seen.positions_T, some,
        facts, (window, width, groups, page, each, size, out), rows, wide,
    )  # fmt: skip
    _joined[(tokens, heads)](some, o_THW, count, out, wide, triton.next_power_of_2(count))


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    q, keys, values, tables, positions, some, facts, sizes, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """A token's query heads of one key-value head over one piece of its sequence: the sum of
    values by weight, the sum of weights and the largest score. sizes: as they are read."""
    scale, softcap = facts
    window, width, groups, page, each, size, out = sizes
    t, g, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.num_programs(2)
    last = tl.load(positions + t)
    low = tl.maximum(last - window + 1, 0)
    r, k, w = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WIDE)
    heads = groups * each
    h = g * each + r
    there_r, there_k, there_w = r < each, k < size, w < out
    q_RK = tl.load(
        q + (t * heads + h).to(tl.int64)[:, None] * size + k[None, :],
        mask=there_r[:, None] & there_k[None, :], other=0.0,
    )  # fmt: skip
    top_R = tl.full((ROWS,), float("-inf"), tl.float32)
    sum_R = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    begin = tl.maximum(piece * _PIECE, low // _CHUNK * _CHUNK)
    end = tl.minimum((piece + 1) * _PIECE, last + 1)
    for at in range(begin, end, _CHUNK):
        c = at + tl.arange(0, _CHUNK)
        seen_C = (c <= last) & (c >= low)
        block_C = tl.load(tables + t * width + c // page, mask=seen_C, other=0)
        row_C = (block_C.to(tl.int64) * page + c % page) * groups + g
        k_CK = tl.load(
            keys + row_C[:, None] * size + k[None, :],
            mask=seen_C[:, None] & there_k[None, :], other=0.0,
        ).to(q_RK.dtype)  # fmt: skip
        v_CW = tl.load(
            values + row_C[:, None] * out + w[None, :],
            mask=seen_C[:, None] & there_w[None, :], other=0.0,
        ).to(q_RK.dtype)  # fmt: skip
        scores = tl.dot(q_RK, tl.trans(k_CK), input_precision="ieee") * scale
        if softcap > 0.0:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(seen_C[None, :], scores, float("-inf"))
        higher_R = tl.maximum(top_R, tl.max(scores, 1))
        held_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
        weight_RC = tl.exp(scores - held_R[:, None])
        shrunk_R = tl.exp(top_R - held_R)
        sum_R = sum_R * shrunk_R + tl.sum(weight_RC, 1)
        total = total * shrunk_R[:, None]
        total += tl.dot(weight_RC.to(v_CW.dtype), v_CW, input_precision="ieee")
        top_R = higher_R
    to = some + ((t * heads + h).to(tl.int64) * count + piece) * (out + 2)
    tl.store(to[:, None] + w[None, :], total, mask=there_r[:, None] & there_w[None, :])
    tl.store(to + out, sum_R, mask=there_r)
    tl.store(to + out + 1, top_R, mask=there_r)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(  # type: ignore[no-untyped-def]
    some, o, count, out, WIDE: tl.constexpr, COUNT: tl.constexpr
):
    """A head of a token: its pieces put together, in their order."""
    t, h = tl.program_id(0), tl.program_id(1)
    row = (t * tl.num_programs(1) + h).to(tl.int64)
    n, w = tl.arange(0, COUNT), tl.arange(0, WIDE)
    here = some + row * count * (out + 2)
    each_N = tl.load(here + n * (out + 2) + out + 1, mask=n < count, other=float("-inf"))
    top, total = tl.max(each_N, 0), 0.0
    o_W = tl.zeros((WIDE,), tl.float32)
    for _ in range(0, count):  # one by one: the same sum in whatever room
        part = tl.exp(tl.load(here + out + 1) - top)
        total += tl.load(here + out) * part
        o_W += tl.load(here + w, mask=w < out, other=0.0) * part
        here += out + 2
    tl.store(o + row * out + w, (o_W / total).to(o.dtype.element_ty), mask=w < out)
