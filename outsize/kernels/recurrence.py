"""Linear recurrences with a decay for each feature of a key, many tokens at a time, on any device.

    S_t = diag(exp(a_t)) S_{t-1} + k_t v_t^T        o_t = scale q_t S_t

Tokens go in tiles: inside a tile scores q_i k_j exp(a_{j+1} + .. + a_i) as in attention, between
tiles the state. In parts of a tile each of these sums is split at the part's border, so that no
exponent is above 0 and float32 is enough (secondary-level chunking; Yang et al., 2023, arXiv
2312.06635). Nothing is kept for the backward pass but the inputs and a state for every few tiles. A
document begins with a state of zeros wherever it lies in a tile.

T tokens laid flat, H heads, K key size, V value size; N tiles of C tokens, P parts of c tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator

Tensors = tuple[Tensor, ...]

# Tokens. Half of the paper's, of a GPU: on a processor 0.8x its time for small heads, 1.0x for
# large ones.
TILE, PART = 32, 8
SLAB = 1 << 18  # elements of the tiles that are computed together: a megabyte of each tensor


def decayed(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    a_THK: Tensor,
    s_HKV: Tensor,
    bounds: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o_THV, dtype as v, and the state behind the last token, of documents laid flat, of which the
    first goes on from s_HKV. a: logarithms of decays, at most 0. In the state's dtype inside."""
    made: tuple[Tensor, Tensor] = _Tiled.apply(q_THK, k_THK, v_THV, a_THK, s_HKV, bounds, scale)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True)
class _Slab:
    """Tiles that are computed together. Of their tokens: same_N1CC: j is not behind i and of one
    document with it; going_N1C1: of the document that the state before the tile is of; last_N1C1:
    of the tile's last document; kept_N: all are of the document that the state is of. tokens: where
    they lie."""

    tokens: slice
    size: int  # C
    same_N1CC: Tensor
    going_N1C1: Tensor
    last_N1C1: Tensor
    kept_N111: Tensor

    def take(self, x_THE: Tensor, wide: torch.dtype) -> Tensor:
        """x_NHCE, zeros behind the last token."""
        x = x_THE[self.tokens].to(wide)
        lack = -x.shape[0] % self.size
        x = F.pad(x, (0, 0, 0, 0, 0, lack)) if lack else x
        x_NHCE: Tensor = x.unflatten(0, (-1, self.size)).transpose(1, 2).contiguous()
        return x_NHCE

    def put(self, out_THE: Tensor, x_NHCE: Tensor) -> None:
        """Write to where they lie."""
        here = out_THE[self.tokens]
        here.copy_(x_NHCE.transpose(1, 2).flatten(0, 1)[: here.shape[0]])


def _slabs(bounds: tuple[int, ...], like_THK: Tensor, widest: int) -> Iterator[_Slab]:
    tokens, device = bounds[-1], like_THK.device
    size = min(TILE, -(-tokens // PART) * PART)
    tiles = -(-tokens // size)
    edges = accelerator.sent(torch.tensor(bounds[1:]), device)
    token_T = torch.arange(tiles * size, device=device).clamp_max(tokens - 1)
    document_NC = torch.bucketize(token_T, edges, right=True).unflatten(0, (tiles, size))
    before_N1 = torch.cat((document_NC[:1, :1], document_NC[:-1, -1:]))
    order_CC = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    each = max(1, SLAB // (like_THK.shape[1] * size * widest))
    for first in range(0, tiles, each):
        here = slice(first, first + each)
        mine_NC, came_N1 = document_NC[here], before_N1[here]
        same_NCC = (mine_NC.unsqueeze(2) == mine_NC.unsqueeze(1)) & order_CC
        yield _Slab(
            slice(first * size, min((first + each) * size, tokens)),
            size,
            same_NCC.unsqueeze(1),
            (mine_NC == came_N1)[:, None, :, None],
            (mine_NC == mine_NC[:, -1:])[:, None, :, None],
            (mine_NC[:, -1:] == came_N1)[:, :, None, None],
        )


class _Tile:
    """What forward and backward compute alike of a slab: decays from the state to each token, from
    each token to the state behind, and of the state."""

    def __init__(self, slab: _Slab, k_NHCK: Tensor, v_NHCV: Tensor, a_NHCK: Tensor) -> None:
        decay_NHCK = a_NHCK.cumsum(2).exp_()
        self.decay_NHK1 = (decay_NHCK[:, :, -1:] * slab.kept_N111).transpose(2, 3)
        self.reach_NHCK = decay_NHCK * slab.going_N1C1
        self.rest_NHCK = _after(a_NHCK).exp_() * slab.last_N1C1
        self.added_NHKV = (k_NHCK * self.rest_NHCK).mT @ v_NHCV

    def states(self, s_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """States before each tile, and behind the last one."""
        before = []
        for decay_HK1, added_HKV in zip(self.decay_NHK1, self.added_NHKV, strict=True):
            before.append(s_HKV)
            s_HKV = torch.addcmul(added_HKV, decay_HK1, s_HKV)
        return torch.stack(before), s_HKV


def _after(a_NHCK: Tensor) -> Tensor:
    """Sums over the tokens behind each one. Sums are made, never differences of longer ones: no
    digit is lost to what decayed long ago."""
    return F.pad(a_NHCK[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)


def _parts(a_NHCK: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """(a part, all before it, decays from the border to the part's tokens, and from those before to
    the border)."""
    for first in range(PART, a_NHCK.shape[2], PART):
        here, there = slice(first, first + PART), slice(0, first)
        yield here, there, a_NHCK[:, :, here].cumsum(2).exp_(), _after(a_NHCK[:, :, there]).exp_()


def _within(a_NHCK: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(a token of all parts, decays from it to itself and those behind it in its part)."""
    a_NHPcK = _inside(a_NHCK)
    sums = torch.zeros_like(a_NHPcK)
    for j in reversed(range(PART)):
        sums[..., j + 1 :, :] += a_NHPcK[..., j + 1 : j + 2, :]
        yield j, sums[..., j:, :].exp()


def _inside(x_NHCE: Tensor) -> Tensor:
    """x_NHPcE."""
    x_NHPcE: Tensor = x_NHCE.unflatten(2, (-1, PART))
    return x_NHPcE


def _diagonal(x_NHCC: Tensor) -> Tensor:
    """x_NHccP, of tokens to others of their part; a view."""
    x_NHPcPc: Tensor = x_NHCC.unflatten(3, (-1, PART)).unflatten(2, (-1, PART))
    return x_NHPcPc.diagonal(dim1=2, dim2=4)


def _scores(q_NHCK: Tensor, k_NHCK: Tensor, a_NHCK: Tensor, same_N1CC: Tensor) -> Tensor:
    """(N, H, C, C): 0 where a token does not see another."""
    size = q_NHCK.shape[2]
    scores = q_NHCK.new_zeros((*q_NHCK.shape[:2], size, size))
    for here, there, to, past in _parts(a_NHCK):
        q, k = q_NHCK[:, :, here] * to, k_NHCK[:, :, there] * past
        scores[:, :, here, there] = q @ k.mT
    own, q, k = _diagonal(scores), _inside(q_NHCK), _inside(k_NHCK)
    for j, decay in _within(a_NHCK):
        column = decay.mul_(q[..., j:, :]).mul_(k[..., j : j + 1, :]).sum(-1)
        own[:, :, j:, j] = column.transpose(2, 3)
    return scores.mul_(same_N1CC)


def _scores_back(
    g_NHCC: Tensor, q_NHCK: Tensor, k_NHCK: Tensor, a_NHCK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k, of those of the scores."""
    gq, gk = torch.zeros_like(q_NHCK), torch.zeros_like(k_NHCK)
    for here, there, to, past in _parts(a_NHCK):
        g = g_NHCC[:, :, here, there]
        gq[:, :, here] += (g @ (k_NHCK[:, :, there] * past)).mul_(to)
        gk[:, :, there] += (g.mT @ (q_NHCK[:, :, here] * to)).mul_(past)
    own = _diagonal(g_NHCC)
    q, k, gq_own, gk_own = (_inside(x) for x in (q_NHCK, k_NHCK, gq, gk))
    for j, decay in _within(a_NHCK):
        g = own[:, :, j:, j].transpose(2, 3).unsqueeze(-1)
        gk_own[..., j, :] += (decay * q[..., j:, :] * g).sum(-2)
        gq_own[..., j:, :] += decay.mul_(k[..., j : j + 1, :]).mul_(g)
    return gq, gk


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        a_THK: Tensor,
        s_HKV: Tensor,
        bounds: tuple[int, ...],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        wide, before = s_HKV.dtype, []
        o_THV = torch.empty_like(v_THV)
        for slab in _slabs(bounds, q_THK, max(q_THK.shape[2], v_THV.shape[2])):
            before.append(s_HKV)
            q, k, v, a = (slab.take(x, wide) for x in (q_THK, k_THK, v_THV, a_THK))
            tile = _Tile(slab, k, v, a)
            q = q * scale
            states_NHKV, s_HKV = tile.states(s_HKV)
            o = (q * tile.reach_NHCK) @ states_NHKV
            o += _scores(q, k, a, slab.same_N1CC) @ v
            slab.put(o_THV, o)
        ctx.save_for_backward(q_THK, k_THK, v_THV, a_THK, *before)
        ctx.facts = (bounds, scale)
        return o_THV, s_HKV

    @staticmethod
    def backward(ctx: Any, go_THV: Tensor, gs_HKV: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_THK, v_THV, a_THK, *before = ctx.saved_tensors
        bounds, scale = ctx.facts
        outputs = [torch.empty_like(x) for x in (q_THK, k_THK, v_THV, a_THK)]
        slabs = list(_slabs(bounds, q_THK, max(q_THK.shape[2], v_THV.shape[2])))
        for slab, s_HKV in zip(reversed(slabs), reversed(before), strict=True):
            given = (q_THK, k_THK, v_THV, a_THK, go_THV)
            q, k, v, a, go = (slab.take(x, gs_HKV.dtype) for x in given)
            gradients, gs_HKV = _slab_back(slab, q * scale, k, v, a, go, s_HKV, gs_HKV)
            gradients[0].mul_(scale)
            for out, g in zip(outputs, gradients, strict=True):
                slab.put(out, g)
        return *outputs, gs_HKV, None, None


def _slab_back(
    slab: _Slab,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    go: Tensor,
    s_HKV: Tensor,
    gs_HKV: Tensor,
) -> tuple[Tensors, Tensor]:
    """Gradients of q (scaled already), k, v, the logarithms, and the state before the slab. Of the
    sum of logarithms up to a token it is q times the gradient of q less k times that of k."""
    tile = _Tile(slab, k, v, a)
    states_NHKV, _ = tile.states(s_HKV)
    given, gs = (q * tile.reach_NHCK).mT @ go, [gs_HKV]
    for decay_HK1, given_HKV in zip(reversed(tile.decay_NHK1), reversed(given), strict=True):
        gs.append(torch.addcmul(given_HKV, decay_HK1, gs[-1]))
    behind_NHKV = torch.stack(gs[-2::-1])  # of the states behind each tile
    scores = _scores(q, k, a, slab.same_N1CC)
    gv = scores.mT @ go + (k * tile.rest_NHCK) @ behind_NHKV
    gq, gk = _scores_back((go @ v.mT).mul_(slab.same_N1CC), q, k, a)
    gq += (go @ states_NHKV.mT).mul_(tile.reach_NHCK)
    gk_state = (v @ behind_NHKV.mT).mul_(tile.rest_NHCK)
    gk += gk_state
    gsum = q * gq - k * gk
    lost_NHK = (states_NHKV * behind_NHKV).sum(-1) * tile.decay_NHK1.squeeze(-1)
    gsum[:, :, -1] += (k * gk_state).sum(2) + lost_NHK
    ga = gsum.flip(2).cumsum(2).flip(2)
    return (gq, gk, gv, ga), gs[-1]
