"""Attention on a CPU over packed documents, with PyTorch's flash kernel (Dao, "FlashAttention-2"):
for large heads, and where outsize/kernels/attention.cpp cannot be built.

One autograd node for all documents of a microbatch keeps queries, keys, values, output and the
log-sum-exp of the scores, so what it holds does not depend on how the documents lie. The kernel
is called for each stretch of equally long documents, forward and back. Lengths are rounded up
to one of eight sizes an octave, for the kernel keeps generated code for every length it has met:
without that, a run over documents of all lengths grows by gigabytes. Added keys come after every
real query, so causality hides them, and added queries are cut off: nothing changes.

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


def rounded(length: int) -> int:
    """The next of eight lengths an octave (multiples of 16 below 128)."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


@dataclass(frozen=True)
class Piece:
    """One kernel call: queries [start, stop) of documents against their keys [low, stop).

    first: token at which the first document begins; documents, length: how many of how many
    tokens.
    """

    first: int
    documents: int
    length: int
    start: int
    stop: int
    low: int

    def take(self, x_TNE: Tensor, start: int, stop: int, size: int) -> Tensor:
        """Tokens [start, stop) of each document as (B, N, S, size), zeros where there are none."""
        x_BSNE = self.view(x_TNE, start, stop)
        lack, short = stop - min(stop, self.length), size - x_TNE.shape[-1]
        if lack or short:
            x_BSNE = F.pad(x_BSNE, (0, short, 0, 0, 0, lack))
        return x_BSNE.transpose(1, 2)

    def view(self, x_TNE: Tensor, start: int, stop: int) -> Tensor:
        """The stored ones of tokens [start, stop) of each document, (B, S, N, E), to write to."""
        tokens = x_TNE[self.first : self.first + self.documents * self.length]
        x_BSNE = tokens.view(self.documents, self.length, *tokens.shape[1:])
        return x_BSNE[:, start : min(stop, self.length)]


def pieces(bounds: tuple[int, ...], window: int | None) -> Iterator[Piece]:
    """The kernel calls of packed documents.

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
            yield from _calls(first + done * length, count, length, padded, window)


def _calls(
    first: int, documents: int, length: int, padded: int, window: int | None
) -> Iterator[Piece]:
    """One call for some documents; one a chunk of queries where a window is shorter."""
    if window is None or window >= length:
        yield Piece(first, documents, length, 0, padded, 0)
        return
    for start, stop, low in chunks(padded, window):
        if start < length:
            yield Piece(first, documents, length, start, stop, low)


def _mask(piece: Piece, window: int | None, like: Tensor) -> Tensor | None:
    """None where plain causality says it all; else 0 and -inf, (C, L)."""
    if window is None or window >= piece.length:
        return None
    seen_CL = visible(piece.start, piece.stop, piece.low, window, like.device)
    return like.new_zeros(seen_CL.shape).masked_fill_(~seen_CL, float("-inf"))


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
        for piece in pieces(facts.bounds, facts.window):
            piece_forward(piece, facts, (q_THK, k_TGK, v_TGW), (o_THW, lse_TH1))
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
        for piece in pieces(ctx.facts.bounds, ctx.facts.window):
            inputs = (go_THW, q_THK, k_TGK, v_TGW, o_THW, lse_TH1)
            piece_backward(piece, ctx.facts, inputs, (gq_THK, gk_TGK, gv_TGW))
        return gq_THK, gk_TGK, gv_TGW, None


# A function a piece, so that one piece's copies are gone before the next one's are made.


def piece_forward(
    piece: Piece, facts: Facts, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> None:
    q_THK, k_TGK, v_TGW = inputs
    start, stop, low = piece.start, piece.stop, piece.low
    q = piece.take(q_THK, start, stop, facts.size)
    k, v = (piece.take(x, low, stop, facts.size) for x in (k_TGK, v_TGW))
    mask = _mask(piece, facts.window, q)
    o, lse = forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=facts.scale)
    o_THW, lse_TH1 = outputs
    _put(piece.view(o_THW, start, stop), o)
    _put(piece.view(lse_TH1, start, stop), lse.unsqueeze(-1))


def piece_backward(
    piece: Piece, facts: Facts, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> None:
    go_THW, q_THK, k_TGK, v_TGW, o_THW, lse_TH1 = inputs
    start, stop, low = piece.start, piece.stop, piece.low
    q, o, go = (piece.take(x, start, stop, facts.size) for x in (q_THK, o_THW, go_THW))
    k, v = (piece.take(x, low, stop, facts.size) for x in (k_TGK, v_TGW))
    lse = piece.take(lse_TH1, start, stop, 1).squeeze(-1)
    mask = _mask(piece, facts.window, q)
    causal = mask is None
    gq, gk, gv = backward(go, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=facts.scale)
    gq_THK, gk_TGK, gv_TGW = gradients
    _put(piece.view(gq_THK, start, stop), gq)
    _add(piece.view(gk_TGK, low, stop), gk)
    _add(piece.view(gv_TGW, low, stop), gv)


def _part(target_BSNE: Tensor, x_BNSE: Tensor) -> Tensor:
    """The stored tokens and features of what a kernel gave, in the order of the target."""
    return x_BNSE.transpose(1, 2)[:, : target_BSNE.shape[1], :, : target_BSNE.shape[3]]


def _put(target_BSNE: Tensor, x_BNSE: Tensor) -> None:
    target_BSNE.copy_(_part(target_BSNE, x_BNSE))


def _add(target_BSNE: Tensor, x_BNSE: Tensor) -> None:
    target_BSNE.add_(_part(target_BSNE, x_BNSE))


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
