"""Attention of a chunk of a sequence to itself and to all that came before, forward and back.

The chunks of a sequence are run one at a time. `KeyValues` holds the keys and values of the whole
sequence; `ChunkAttend` stands at the `Attend` seam for one chunk, so a block runs as it is written.
Going back, chunks are differentiated from the last to the first: when a chunk's turn comes, every
later query has added to the gradients of its keys and values, which then go through the chunk's own
projections at once. (Luo et al., "StreamBP: Memory-Efficient Exact Backpropagation for Long
Sequence Training of LLMs", 2025, whose chunks go first to last and keep the graph of all keys.)

On a CPU our kernel sees the chunk as the last queries of its tokens. Where that does not serve
(float64), PyTorch's is called for the chunk's own tokens and for stretches of those before it, and
log-sum-exps put the parts together, as between the workers of ring attention (Liu et al., 2023).

T tokens of the sequences laid flat, C of a chunk, N queries that see a stretch of L keys, H query
heads, G key-value heads, K head size, W value size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels import attention as kernel
from outsize.models import flash
from outsize.models.attention import attend
from outsize.models.layout import chunks, clip, runs
from outsize.models.norm import upcast
from outsize.models.seams import AttendSpec

KEYS_MOST = 4096  # of one kernel call: the gradients it gives are copies


class KeyValues:
    """Keys and values of a layer for the whole sequences of a microbatch, and their gradients, in
    float32 at least, summed over chunks."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self._values: tuple[Tensor, Tensor] | None = None
        self._gradients: tuple[Tensor, Tensor] | None = None

    def put(self, start: int, k_CGK: Tensor, v_CGW: Tensor) -> None:
        """Store those of the tokens from `start` on."""
        tokens = self.bounds[-1]
        if self._values is None:
            self._values = (
                k_CGK.new_empty((tokens, *k_CGK.shape[1:])),
                v_CGW.new_empty((tokens, *v_CGW.shape[1:])),
            )
        for held, new in zip(self._values, (k_CGK, v_CGW), strict=True):
            held[start : start + new.shape[0]] = new

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """k_TGK, v_TGW."""
        assert self._values is not None, "keys are stored before they are attended to"
        return self._values

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of k_TGK and v_TGW: zeros at first."""
        if self._gradients is None:
            k_TGK, v_TGW = self.values
            wide = torch.promote_types(k_TGK.dtype, torch.float32)
            self._gradients = (
                torch.zeros_like(k_TGK, dtype=wide),
                torch.zeros_like(v_TGW, dtype=wide),
            )
        return self._gradients


@dataclass(frozen=True)
class ChunkAttend:
    """The `Attend` of the tokens from `start` on; see the head of this file.

    Without gradients it stores the keys and values it is given. With them, those of all tokens up
    to the chunk's end must be there, and the chunk's come back with what later chunks have added.
    """

    held: KeyValues
    start: int

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            self.held.put(self.start, k_TGK, v_TGW)
        part = _Part(self.held, self.start, self.start + q_THK.shape[0], spec)
        way: type[torch.autograd.Function] = _Any
        if q_THK.device.type == "cpu" and spec.softcap is None:
            way = _Native if kernel.fits(q_THK, *self.held.values) else _Fused
        o: Tensor = way.apply(q_THK, k_TGK, v_TGW, part)
        return o


@dataclass(frozen=True)
class _Part:
    """What one call attends: tokens start .. stop of `held`."""

    held: KeyValues
    start: int
    stop: int
    spec: AttendSpec

    @property
    def bounds(self) -> tuple[int, ...]:
        """Of the documents inside the chunk, counted from its start."""
        return clip(self.held.bounds, self.start, self.stop)

    @property
    def past(self) -> int:
        """Tokens before the chunk that belong to the document it begins in."""
        bounds = self.held.bounds
        return self.start - bounds[bisect_right(bounds, self.start) - 1]

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Of the chunk's keys and values: complete once its own queries are differentiated."""
        k_TGK, v_TGW = self.held.values
        gk_TGK, gv_TGW = self.held.gradients
        here = slice(self.start, self.stop)
        return gk_TGK[here].to(k_TGK.dtype), gv_TGW[here].to(v_TGW.dtype)


# -- any device: differentiable calls, their graphs kept ----------------------------------------


class _Any(torch.autograd.Function):
    """Documents of equal length through `attend`, whose graph is held until the backward pass."""

    @staticmethod
    def forward(ctx: Any, q_CHK: Tensor, k_CGK: Tensor, v_CGW: Tensor, part: _Part) -> Tensor:
        train = any(ctx.needs_input_grad)
        pieces = []
        for queries, keys, documents in _documents(part):
            cut = (q_CHK[queries], *(x[keys] for x in part.held.values))
            leaves = [x.detach().requires_grad_(train) for x in cut]
            with torch.set_grad_enabled(train):
                q, k, v = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in leaves)
                o = attend(q, k, v, part.spec).transpose(1, 2).flatten(0, 1)
            pieces.append((queries, keys, leaves, o))
        ctx.part, ctx.pieces = part, pieces if train else []
        return torch.cat([o.detach() for *_, o in pieces])

    @staticmethod
    def backward(ctx: Any, go_CHW: Tensor) -> tuple[Tensor | None, ...]:
        gradients, found = ctx.part.held.gradients, []
        while ctx.pieces:
            queries, keys, leaves, o = ctx.pieces.pop(0)
            torch.autograd.backward(o, go_CHW[queries])
            for total, x in zip(gradients, leaves[1:], strict=True):
                total[keys] += x.grad
            found.append(leaves[0].grad)
        return torch.cat(found), *ctx.part.own_gradients(), None


def _documents(part: _Part) -> Iterator[tuple[slice, slice, int]]:
    """(queries in the chunk, keys in the sequence, documents) of stretches of equal documents."""
    first = part.bounds[1] if part.past else 0  # a document that goes on is on its own
    if first:
        yield slice(0, first), slice(part.start - part.past, part.start + first), 1
    for start, documents, length in runs(clip(part.bounds, first, part.bounds[-1])):
        if length:
            begin, end = first + start, first + start + documents * length
            yield slice(begin, end), slice(part.start + begin, part.start + end), documents


# -- a CPU: our own kernel ---------------------------------------------------------------------


class _Native(torch.autograd.Function):
    """One call for all documents of the chunk; the kernel adds to the gradients of keys itself."""

    @staticmethod
    def forward(ctx: Any, q_CHK: Tensor, k_CGK: Tensor, v_CGW: Tensor, part: _Part) -> Tensor:
        ctx.lead = part.past % kernel.BLOCK  # queries begin a tile: there are some before the first
        q = _behind(ctx.lead, q_CHK)
        made = torch.ops.outsize.attention.default(q, *_seen(part, part.held.values), *_sight(part))
        o, lse = made
        ctx.save_for_backward(q, o, lse)
        ctx.part = part
        o_CHW: Tensor = o[ctx.lead :]
        return o_CHW

    @staticmethod
    def backward(ctx: Any, go_CHW: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse = ctx.saved_tensors
        part: _Part = ctx.part
        go = _behind(ctx.lead, go_CHW if go_CHW.stride(2) == 1 else go_CHW.contiguous())
        values, gradients = (_seen(part, x) for x in (part.held.values, part.held.gradients))
        gq = torch.ops.outsize.attention_backward_into.default(
            go, q, *values, o, lse, *gradients, *_sight(part)
        )
        return gq[ctx.lead :].to(q.dtype), *part.own_gradients(), None


def _behind(lead: int, x_CHE: Tensor) -> Tensor:
    """With `lead` tokens of zeros before the first; they get no gradient and give none."""
    return F.pad(x_CHE, (0, 0, 0, 0, lead, 0)) if lead else x_CHE


def _seen(part: _Part, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """From the start of the document that the chunk begins in to the chunk's end."""
    here = slice(part.start - part.past, part.stop)
    return x[0][here], x[1][here]


def _sight(part: _Part) -> tuple[tuple[int, ...], float, int | None]:
    bounds = (0, *(bound + part.past for bound in part.bounds[1:]))
    return bounds, part.spec.scale, part.spec.window


# -- a CPU: PyTorch's kernel -------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_CHK: Tensor, k_CGK: Tensor, v_CGW: Tensor, part: _Part) -> Tensor:
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
        part: _Part = ctx.part
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


def _facts(part: _Part, q_CHK: Tensor, v_TGW: Tensor) -> flash.Facts:
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


def _stretches(part: _Part) -> Iterator[_Stretch]:
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
    part: _Part, facts: flash.Facts, q_CHK: Tensor, o_CHW: Tensor, lse_CH1: Tensor
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
    part: _Part,
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
    part: _Part,
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
