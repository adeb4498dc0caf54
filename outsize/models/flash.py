"""Attention on a CPU over packed documents, with PyTorch's flash kernel (Dao, "FlashAttention-2"):
for float64, for large heads, and where outsize/kernels/attention.cpp cannot be built.

One autograd node for all documents of a microbatch keeps queries, keys, values, output and the
log-sum-exp of the scores, so what it holds does not depend on how the documents lie. The kernel
is called for each stretch of equally long documents, forward and back. Lengths are rounded up
to one of eight sizes an octave, for the kernel keeps generated code for every length it has met:
without that, a run over documents of all lengths grows by gigabytes. Added keys come after every
real query, so causality hides them, and added queries are cut off: nothing changes. Documents
that are few tokens in all share a call whatever their lengths: calls would cost more than they do.

T tokens laid flat, H query heads, G key-value heads, K head size, W value size; inside one call B
documents of S tokens, C queries of a chunk, L keys it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels import attention, native, rows
from outsize.kernels import pages as paged
from outsize.models.layout import chunks, runs, visible
from outsize.torch_private import flash_backward, flash_forward

forward = flash_forward
backward = flash_backward
FEW = 256  # tokens, as the kernel sees them, that share a call


def rounded(length: int) -> int:
    """The next of eight lengths an octave (multiples of 16 below 128)."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


@dataclass(frozen=True)
class Piece:
    """One kernel call: queries [start, stop) of documents against their keys [low, stop).

    first: token at which the first document begins; documents, length: how many of how many
    tokens; padded: their length as the kernel sees it; window: the last keys that a query sees,
    None where causality says it all.
    """

    first: int
    documents: int
    length: int
    padded: int
    start: int
    stop: int
    low: int
    window: int | None

    def queries(self, x_TNE: Tensor, size: int) -> Tensor:
        """Of the tokens what the kernel takes for queries, (B, N, C, size)."""
        return self._take(x_TNE, self.start, size)

    def keys(self, x_TNE: Tensor, size: int) -> Tensor:
        """Of the tokens what the kernel takes for keys, (B, N, L, size)."""
        return self._take(x_TNE, self.low, size)

    def put(self, target_TNE: Tensor, x_BNCE: Tensor) -> None:
        """Write what the kernel gave for queries."""
        target_BSNE = self._view(target_TNE, self.start)
        target_BSNE.copy_(_part(target_BSNE, x_BNCE))

    def add(self, target_TNE: Tensor, x_BNLE: Tensor) -> None:
        """Add what the kernel gave for keys, which other queries see too."""
        target_BSNE = self._view(target_TNE, self.low)
        target_BSNE.add_(_part(target_BSNE, x_BNLE))

    def mask(self, like: Tensor) -> Tensor | None:
        """None where causality says it all; else 0 and -inf, (C, L)."""
        if self.window is None:
            return None
        return _mask(visible(self.start, self.stop, self.low, self.window, like.device), like)

    def _take(self, x_TNE: Tensor, start: int, size: int) -> Tensor:
        """Tokens [start, stop) of each document, zeros where there are none."""
        x_BSNE = self._view(x_TNE, start)
        lack, short = self.stop - min(self.stop, self.length), size - x_TNE.shape[-1]
        if lack or short:
            x_BSNE = F.pad(x_BSNE, (0, short, 0, 0, 0, lack))
        return x_BSNE.transpose(1, 2)

    def _view(self, x_TNE: Tensor, start: int) -> Tensor:
        """The stored ones of tokens [start, stop) of each document, (B, S, N, E), to write to."""
        tokens = x_TNE[self.first : self.first + self.documents * self.length]
        x_BSNE = tokens.view(self.documents, self.length, *tokens.shape[1:])
        return x_BSNE[:, start : min(self.stop, self.length)]


@dataclass(frozen=True)
class Together:
    """One kernel call for all documents. padded: their length as the kernel sees it; places_T:
    where it sees each token, one document behind another; window: as of a Piece."""

    documents: int
    padded: int
    places_T: Tensor
    window: int | None

    def queries(self, x_TNE: Tensor, size: int) -> Tensor:
        """Of the tokens what the kernel takes for queries and for keys, (B, N, S, size)."""
        x_PNE = x_TNE.new_zeros((self.documents * self.padded, x_TNE.shape[1], size))
        x_PNE[..., : x_TNE.shape[2]].index_copy_(0, self.places_T, x_TNE)
        return x_PNE.view(self.documents, self.padded, *x_PNE.shape[1:]).transpose(1, 2)

    keys = queries

    def tokens(self, x_BNSE: Tensor) -> Tensor:
        """What the kernel gave for each token, (T, N, E)."""
        return x_BNSE.transpose(1, 2).flatten(0, 1).index_select(0, self.places_T)

    def put(self, target_TNE: Tensor, x_BNSE: Tensor) -> None:
        """Write what the kernel gave, which is all there is for a token."""
        target_TNE.copy_(self.tokens(x_BNSE[..., : target_TNE.shape[2]]))

    add = put

    def mask(self, like: Tensor) -> Tensor | None:
        """None where causality says it all; else 0 and -inf, (S, S)."""
        if self.window is None:
            return None
        return _mask(visible(0, self.padded, 0, self.window, like.device), like)


def together(bounds: tuple[int, ...], window: int | None, device: torch.device) -> Together | None:
    """Several documents in one call, where they are few tokens."""
    lengths = [stop - start for start, stop in pairwise(bounds) if stop > start]
    longest = max(lengths, default=0)
    padded = rounded(longest)
    if len(lengths) < 2 or len(lengths) * padded > FEW:
        return None
    starts = range(0, len(lengths) * padded, padded)
    places_T = torch.cat([
        torch.arange(start, start + length, device=device)
        for start, length in zip(starts, lengths, strict=True)
    ])  # fmt: skip
    seen = None if window is None or window >= longest else window
    return Together(len(lengths), padded, places_T, seen)


def calls(
    bounds: tuple[int, ...], window: int | None, device: torch.device
) -> Iterator[Piece | Together]:
    """The kernel calls of packed documents."""
    one = together(bounds, window, device)
    yield from pieces(bounds, window) if one is None else (one,)


def pieces(bounds: tuple[int, ...], window: int | None) -> Iterator[Piece]:
    """The kernel calls of packed documents that are many tokens.

    Documents of equal length share a call as long as they are no larger together, as the kernel
    sees them, than the longest alone: so no layout needs more memory than one long document.
    """
    longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
    for first, documents, length in runs(bounds):
        if not length:
            continue
        padded = rounded(length)
        most = max(1, rounded(longest) // padded)
        for done in range(0, documents, most):
            count = min(most, documents - done)
            yield from _chunked(first + done * length, count, length, padded, window)


def _chunked(
    first: int, documents: int, length: int, padded: int, window: int | None
) -> Iterator[Piece]:
    """One call for some documents; one a chunk of queries where a window is shorter."""
    if window is None or window >= length:
        yield Piece(first, documents, length, padded, 0, padded, 0, None)
        return
    for start, stop, low in chunks(padded, window):
        if start < length:
            yield Piece(first, documents, length, padded, start, stop, low, window)


def _mask(seen_CL: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(seen_CL.shape).masked_fill_(~seen_CL, float("-inf"))


def _part(target_BSNE: Tensor, x_BNSE: Tensor) -> Tensor:
    """The stored tokens and features of what a kernel gave, in the order of the target."""
    return x_BNSE.transpose(1, 2)[:, : target_BSNE.shape[1], :, : target_BSNE.shape[3]]


@dataclass(frozen=True)
class Facts:
    """What a call of attention is asked. size: of the heads as the kernel sees them."""

    bounds: tuple[int, ...]
    scale: float
    window: int | None
    size: int


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THK: Tensor, k_TGK: Tensor, v_TGW: Tensor, facts: Facts) -> Tensor:
        tokens, heads, _ = q_THK.shape
        o_THW = q_THK.new_empty((tokens, heads, v_TGW.shape[2]))
        wide = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
        lse_TH1 = q_THK.new_empty((tokens, heads, 1), dtype=wide)
        for call in calls(facts.bounds, facts.window, q_THK.device):
            call_forward(call, facts, (q_THK, k_TGK, v_TGW), (o_THW, lse_TH1))
        if rows.here() and native.reads(q_THK, k_TGK, v_TGW):  # the same in serving's order
            sight = facts.bounds, facts.scale, facts.window
            o_THW = paged.documents(q_THK, k_TGK, v_TGW, *sight)
        ctx.save_for_backward(q_THK, k_TGK, v_TGW, o_THW, lse_TH1)
        ctx.facts = facts
        return o_THW

    @staticmethod
    def backward(ctx: Any, go_THW: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TGK, v_TGW, o_THW, lse_TH1 = ctx.saved_tensors
        gq_THK = torch.empty_like(q_THK)
        gk_TGK, gv_TGW = torch.zeros_like(k_TGK), torch.zeros_like(v_TGW)
        for call in calls(ctx.facts.bounds, ctx.facts.window, q_THK.device):
            inputs = (go_THW, q_THK, k_TGK, v_TGW, o_THW, lse_TH1)
            call_backward(call, ctx.facts, inputs, (gq_THK, gk_TGK, gv_TGW))
        return gq_THK, gk_TGK, gv_TGW, None


# A function a call, so that one call's copies are gone before the next one's are made.


def call_forward(
    call: Piece | Together,
    facts: Facts,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
) -> None:
    q_THK, k_TGK, v_TGW = inputs
    q, k, v = (
        call.queries(q_THK, facts.size),
        call.keys(k_TGK, facts.size),
        call.keys(v_TGW, facts.size),
    )
    mask = call.mask(q)
    o, lse = forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=facts.scale)
    o_THW, lse_TH1 = outputs
    call.put(o_THW, o)
    call.put(lse_TH1, lse.unsqueeze(-1))


def call_backward(
    call: Piece | Together,
    facts: Facts,
    inputs: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
) -> None:
    go_THW, q_THK, k_TGK, v_TGW, o_THW, lse_TH1 = inputs
    q, o, go = (call.queries(x, facts.size) for x in (q_THK, o_THW, go_THW))
    k, v = (call.keys(x, facts.size) for x in (k_TGK, v_TGW))
    lse = call.queries(lse_TH1, 1).squeeze(-1)
    mask = call.mask(q)
    causal = mask is None
    gq, gk, gv = backward(go, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=facts.scale)
    gq_THK, gk_TGK, gv_TGW = gradients
    call.put(gq_THK, gq)
    call.add(gk_TGK, gk)
    call.add(gv_TGW, gv)


def flash(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGW: Tensor,
    bounds: tuple[int, ...],
    scale: float,
    window: int | None,
) -> Tensor:
    """o_THW of causal attention inside each document, on a CPU, any float dtype but half: by our
    own kernel where it fits, else by PyTorch's."""
    if attention.fits(q_THK, k_TGK, v_TGW):
        return attention.attend(q_THK, k_TGK, v_TGW, bounds, scale, window)
    size = max(q_THK.shape[2], v_TGW.shape[2])
    o: Tensor = _Flash.apply(q_THK, k_TGK, v_TGW, Facts(bounds, scale, window, size))  # type: ignore[no-untyped-call]
    return o
