"""Attention of a chunk by PyTorch's flash kernel on a CPU, where our own does not serve (float64).

It is called for the chunk's own tokens and for stretches of those before it; log-sum-exps put the
parts together, as between the workers of ring attention (Liu et al., 2023).

T tokens of the sequences laid flat, C of a chunk, N queries that see a stretch of L keys, H query
heads, G key-value heads, K head size, W value size, E any of the last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.models import flash
from outsize.models.chunk import Part
from outsize.models.layout import chunks
from outsize.models.norm import upcast

KEYS_MOST = 4096  # of one kernel call: the gradients it gives are copies


class FusedPart(torch.autograd.Function):
    """One chunk; gradients of keys and values are added to those of the sequence."""

    @staticmethod
    def forward(ctx: Any, q_CHK: Tensor, k_CGK: Tensor, v_CGW: Tensor, part: Part) -> Tensor:
        tokens, heads, _ = q_CHK.shape
        k_TGK, v_TGW = part.held.values
        facts, here = _facts(part, q_CHK, v_TGW), slice(part.start, part.stop)
        o_CHW = q_CHK.new_empty((tokens, heads, v_TGW.shape[2]))
        wide = torch.promote_types(q_CHK.dtype, torch.float32)
        lse_CH1 = q_CHK.new_empty((tokens, heads, 1), dtype=wide)
        own = (q_CHK, k_TGK[here], v_TGW[here])
        for piece in flash.pieces(facts.bounds, facts.window):
            flash.piece_forward(piece, facts, own, (o_CHW, lse_CH1))
        _add_past(part, facts, q_CHK, o_CHW, lse_CH1)
        ctx.save_for_backward(q_CHK, o_CHW, lse_CH1)
        ctx.part = part
        return o_CHW

    @staticmethod
    def backward(ctx: Any, go_CHW: Tensor) -> tuple[Tensor | None, ...]:
        q_CHK, o_CHW, lse_CH1 = ctx.saved_tensors
        part: Part = ctx.part
        k_TGK, v_TGW = part.held.values
        facts, here = _facts(part, q_CHK, v_TGW), slice(part.start, part.stop)
        gk_TGK, gv_TGW = part.held.gradients
        gq_CHK = torch.empty_like(q_CHK, dtype=gk_TGK.dtype)
        inputs = (go_CHW, q_CHK, k_TGK[here], v_TGW[here], o_CHW, lse_CH1)
        for piece in flash.pieces(facts.bounds, facts.window):
            flash.piece_backward(piece, facts, inputs, (gq_CHK, gk_TGK[here], gv_TGW[here]))
        for stretch in _stretches(part):
            _stretch_backward(stretch, part, facts, (go_CHW, q_CHK, o_CHW, lse_CH1), gq_CHK)
        return gq_CHK.to(q_CHK.dtype), *part.own_gradients(), None


def _facts(part: Part, q_CHK: Tensor, v_TGW: Tensor) -> flash.Facts:
    size = max(q_CHK.shape[2], v_TGW.shape[2])
    return flash.Facts(part.bounds, part.spec.scale, part.spec.window, size)


@dataclass(frozen=True)
class _Stretch:
    """Queries start .. stop of the chunk that see tokens low .. high before it, as far as the
    window reaches if there is one. shift: from places in the chunk to places in the sequence."""

    start: int
    stop: int
    low: int
    high: int
    window: int | None = None
    shift: int = 0

    def queries(self, x_CNE: Tensor, size: int) -> Tensor:
        """(1, N, rounded queries, size), zeros where there are none."""
        return _laid(x_CNE[self.start : self.stop], flash.rounded(self.stop - self.start), size)

    def keys(self, x_TNE: Tensor, size: int) -> Tensor:
        """(1, N, L, size); L is rounded where a mask hides what is too much."""
        length = self.high - self.low
        return _laid(
            x_TNE[self.low : self.high], length if self.window is None else flash.rounded(length),
            size,
        )  # fmt: skip

    def mask(self, like: Tensor) -> Tensor | None:
        """0 and -inf, (rounded queries, L); None where all is seen."""
        if self.window is None:
            return None
        count = flash.rounded(self.stop - self.start)
        length = flash.rounded(self.high - self.low)
        first = self.start + self.shift
        mask_NL = like.new_full((count, length), float("-inf"))
        query_N1 = torch.arange(first, first + count, device=like.device).unsqueeze(1)
        key_L = torch.arange(self.low, self.low + length, device=like.device)
        seen_NL = (key_L > query_N1 - self.window) & (key_L < self.high)
        # A query that was added sees the last key, for a row of nothing has no softmax.
        seen_NL[self.stop - self.start :, self.high - self.low - 1] = True
        return mask_NL.masked_fill_(seen_NL, 0.0)


def _laid(x_SNE: Tensor, tokens: int, size: int) -> Tensor:
    """(1, N, tokens, size) of x_SNE, zeros where it has none."""
    lack, short = tokens - x_SNE.shape[0], size - x_SNE.shape[2]
    if lack or short:
        x_SNE = F.pad(x_SNE, (0, short, 0, 0, 0, lack))
    return x_SNE.unsqueeze(0).transpose(1, 2)


def _stretches(part: Part) -> Iterator[_Stretch]:
    """What the chunk's first document sees of its tokens before the chunk."""
    past, window, shift = part.past, part.spec.window, part.start
    count, begin = part.bounds[1], part.start - past
    if not past or not count:
        return
    if window is None or window >= past + count:
        for low, high in _cut(begin, part.start):
            yield _Stretch(0, count, low, high)
        return
    # Query i sees the i + 1 - window tokens up to the chunk's start: none from window - 1 on.
    for start, stop, _ in chunks(min(count, window - 1), window):
        low = max(begin, shift + start - window + 1)
        yield _Stretch(start, stop, low, part.start, window, shift)


def _cut(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Stretches of keys of few different lengths (see flash.py): eight an octave, none padded."""
    while low < high:
        length = min(high - low, KEYS_MOST)
        step = max(1, 1 << max(0, length.bit_length() - 4))
        length -= length % step
        yield low, low + length
        low += length


def _add_past(
    part: Part, facts: flash.Facts, q_CHK: Tensor, o_CHW: Tensor, lse_CH1: Tensor
) -> None:
    """Turn what the chunk's own keys gave into what they and those before them give."""
    stretches = list(_stretches(part))
    if not stretches:
        return
    count = max(stretch.stop for stretch in stretches)
    total_NHW = upcast(o_CHW[:count])  # rounded to half precision once, not once a stretch
    for stretch in stretches:
        _stretch_forward(stretch, part, facts, q_CHK, total_NHW, lse_CH1)
    o_CHW[:count] = total_NHW


def _stretch_forward(
    stretch: _Stretch,
    part: Part,
    facts: flash.Facts,
    q_CHK: Tensor,
    total_NHW: Tensor,
    lse_CH1: Tensor,
) -> None:
    q = stretch.queries(q_CHK, facts.size)
    k, v = (stretch.keys(x, facts.size) for x in part.held.values)
    o, lse = flash.forward(q, k, v, 0.0, False, attn_mask=stretch.mask(q), scale=facts.scale)
    here = slice(stretch.start, stretch.stop)
    count, width = stretch.stop - stretch.start, total_NHW.shape[2]
    o_NHW = o[0].transpose(0, 1)[:count, :, :width]
    lse_NH1 = lse[0].transpose(0, 1)[:count].unsqueeze(-1)
    share_NH1 = torch.sigmoid(lse_NH1 - lse_CH1[here])  # of the stretch in the softmax's sum
    total_NHW[here].lerp_(o_NHW.to(total_NHW.dtype), share_NH1.to(total_NHW.dtype))
    lse_CH1[here] = torch.logaddexp(lse_CH1[here], lse_NH1)


def _stretch_backward(
    stretch: _Stretch,
    part: Part,
    facts: flash.Facts,
    inputs: tuple[Tensor, ...],
    gq_CHK: Tensor,
) -> None:
    go_CHW, q_CHK, o_CHW, lse_CH1 = inputs
    go, q, o = (stretch.queries(x, facts.size) for x in (go_CHW, q_CHK, o_CHW))
    lse = stretch.queries(lse_CH1, 1).squeeze(-1)
    k, v = (stretch.keys(x, facts.size) for x in part.held.values)
    mask = stretch.mask(q)
    gq, *gkv = flash.backward(go, q, k, v, o, lse, 0.0, False, attn_mask=mask, scale=facts.scale)
    _add(gq_CHK[stretch.start : stretch.stop], gq)
    for total_TGE, g in zip(part.held.gradients, gkv, strict=True):
        _add(total_TGE[stretch.low : stretch.high], g)


def _add(total_SNE: Tensor, g_1NSE: Tensor) -> None:
    total_SNE.add_(g_1NSE[0].transpose(0, 1)[: total_SNE.shape[0], :, : total_SNE.shape[2]])
