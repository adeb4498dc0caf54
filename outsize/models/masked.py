"""Attention with any rule of who sees whom, in plain PyTorch, and the merging of partial results.

`attend_masked` gives beside its output the log-sum-exp of each query's scores. Of results over
parts of the keys, `merge` then makes the result over all of them, exactly and differentiably (as
between the workers of ring attention, Liu et al., 2023, or the blocks of flash attention).

Scores are made for a chunk of queries at a time, again in the backward pass: memory is
proportional to the tokens.

T queries laid flat, L keys, H query heads, G key-value heads, R = H / G, C queries of a chunk, K
head size, W value size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.models.layout import CHUNK_LEAST
from outsize.models.norm import upcast
from outsize.models.seams import AttendSpec

Part = tuple[Tensor, Tensor]  # o_THW, lse_TH


def attend_masked(
    q_THK: Tensor, k_LGK: Tensor, v_LGW: Tensor, bounds: tuple[int, ...], spec: AttendSpec
) -> Part:
    """o_THW and the log-sum-exp lse_TH of the scores (float32 at least), differentiable in both.
    A query that sees nothing gets 0 and -inf."""
    _check(spec, bounds, q_THK.shape[0], k_LGK.shape[0])
    tree = None if spec.tree is None else ancestors(spec.tree, q_THK.device)
    part: Part = _Masked.apply(q_THK, k_LGK, v_LGW, bounds, spec, tree)  # type: ignore[no-untyped-call]
    return part


def merge(parts: Sequence[Part]) -> Part:
    """What attention over all keys gives, of what it gave over parts that do not overlap."""
    lse_PTH = torch.stack([lse_TH for _, lse_TH in parts])
    top_TH = lse_PTH.detach().amax(0)
    top_TH = top_TH.masked_fill(top_TH == -math.inf, 0.0)
    weight_PTH = (lse_PTH - top_TH).exp()
    total_TH = weight_PTH.sum(0)
    none_TH = total_TH == 0
    total_TH = total_TH.masked_fill(none_TH, 1.0)
    terms = (
        upcast(o_THW) * (w_TH / total_TH).unsqueeze(-1)
        for (o_THW, _), w_TH in zip(parts, weight_PTH, strict=True)
    )
    o_THW = sum(terms, start=torch.zeros((), dtype=lse_PTH.dtype, device=lse_PTH.device))
    lse_TH = (top_TH + total_TH.log()).masked_fill(none_TH, -math.inf)
    return o_THW.to(parts[0][0].dtype), lse_TH


def ancestors(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """(T, T) bool: whether a token (row) is another (column) or descends from it."""
    parent_T = torch.tensor(parents, dtype=torch.int64, device=device)
    token_T = torch.arange(len(parents), device=device)
    sees_TT = torch.zeros(len(parents), len(parents), dtype=torch.bool, device=device)
    row_N, at_N = token_T, token_T
    while len(row_N):
        sees_TT[row_N, at_N] = True
        at_N = parent_T[at_N]
        row_N, at_N = row_N[at_N >= 0], at_N[at_N >= 0]
    return sees_TT


def sees(
    query_C: Tensor, key_L: Tensor, bounds: tuple[int, ...], spec: AttendSpec, tree: Tensor | None
) -> Tensor:
    """(C, L) bool: which of the keys each query sees; both by their numbers among the tokens."""
    edges = torch.tensor(bounds, device=query_C.device)
    document_C1 = torch.bucketize(query_C, edges, right=True).unsqueeze(1)
    same_CL = document_C1 == torch.bucketize(key_L, edges, right=True)
    if tree is not None:
        return same_CL & tree[query_C][:, key_L]
    back_CL = query_C.unsqueeze(1) - key_L
    seen_CL = back_CL >= 0 if spec.causal else torch.ones_like(same_CL)
    if spec.window is not None:
        seen_CL = seen_CL & (back_CL.abs() < spec.window)
    if spec.prefix:
        seen_CL = seen_CL | (key_L < edges[document_C1 - 1] + spec.prefix)
    return same_CL & seen_CL


def _check(spec: AttendSpec, bounds: tuple[int, ...], queries: int, keys: int) -> None:
    tokens = max(spec.first_query + queries, spec.first_key + keys)
    if tokens > bounds[-1]:
        raise OutsizeError(
            f"attention: queries and keys reach token {tokens}, but the documents have"
            f" {bounds[-1]}; expected bounds of all tokens that are attended"
        )
    if spec.tree is None:
        return
    if spec.window is not None or spec.prefix or not spec.causal:
        raise OutsizeError(
            "attention: a tree says all that a token sees; window and prefix do not go with it"
        )
    if len(spec.tree) < tokens:
        raise OutsizeError(
            f"attention: the tree has {len(spec.tree)} parents; expected one for each of"
            f" {tokens} tokens"
        )
    for token, parent in enumerate(spec.tree):
        if not -1 <= parent < token:
            raise OutsizeError(
                f"attention: the parent of token {token} is {parent}; expected an earlier token,"
                " or -1 for none"
            )


def _chunks(
    bounds: tuple[int, ...], spec: AttendSpec, queries: int, keys: int
) -> Iterator[tuple[slice, slice]]:
    """(queries, keys) of each chunk: of the keys those that its queries can see at most."""
    for first in range(0, queries, CHUNK_LEAST):
        last = min(first + CHUNK_LEAST, queries)
        start, stop = spec.first_query + first, spec.first_query + last
        low = bounds[bisect_right(bounds, start) - 1]
        high = bounds[bisect_left(bounds, stop)]
        if spec.causal and not spec.prefix:
            high = min(high, stop)
        if spec.window is not None and not spec.prefix:
            low = max(low, start - spec.window + 1)
            high = min(high, stop + spec.window - 1)
        here = (min(max(token - spec.first_key, 0), keys) for token in (low, high))
        yield slice(first, last), slice(*here)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_LGK: Tensor,
        v_LGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
        tree: Tensor | None,
    ) -> Part:
        tokens, heads, _ = q_THK.shape
        o_THW = q_THK.new_zeros((tokens, heads, v_LGW.shape[2]))
        wide = torch.promote_types(q_THK.dtype, torch.float32)
        lse_TH = q_THK.new_full((tokens, heads), -math.inf, dtype=wide)
        for here, there in _chunks(bounds, spec, tokens, k_LGK.shape[0]):
            if there.stop <= there.start:
                continue
            score, _ = _scores(q_THK, k_LGK, (here, there), bounds, spec, tree)
            lse_GRC = score.logsumexp(-1)
            weight = (score - _finite(lse_GRC)).exp_()
            o_GRCW = weight.to(v_LGW.dtype) @ v_LGW[there].transpose(0, 1).unsqueeze(1)
            o_THW[here] = o_GRCW.permute(2, 0, 1, 3).flatten(1, 2)
            lse_TH[here] = lse_GRC.permute(2, 0, 1).flatten(1, 2)
        ctx.save_for_backward(q_THK, k_LGK, v_LGW, o_THW, lse_TH)
        ctx.facts = (bounds, spec, tree)
        ctx.set_materialize_grads(True)
        return o_THW, lse_TH

    @staticmethod
    def backward(ctx: Any, go_THW: Tensor, glse_TH: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_LGK, v_LGW, o_THW, lse_TH = ctx.saved_tensors
        bounds, spec, tree = ctx.facts
        wide, groups = lse_TH.dtype, k_LGK.shape[1]
        gq_THK = torch.zeros_like(q_THK)
        gk_LGK, gv_LGW = (torch.zeros_like(x, dtype=wide) for x in (k_LGK, v_LGW))
        pull_TH = glse_TH - (upcast(go_THW) * upcast(o_THW)).sum(-1)
        for here, there in _chunks(bounds, spec, q_THK.shape[0], k_LGK.shape[0]):
            if there.stop <= there.start:
                continue
            score, slope = _scores(q_THK, k_LGK, (here, there), bounds, spec, tree)
            lse, pull = (
                _by_group(x[here].unsqueeze(-1), groups)[..., 0] for x in (lse_TH, pull_TH)
            )
            weight = (score - _finite(lse)).exp_()
            go, q = (_by_group(x[here], groups) for x in (go_THW, q_THK))
            k, v = (x[there].transpose(0, 1).unsqueeze(1) for x in (k_LGK, v_LGW))
            gscore = weight * (upcast(go @ v.mT) + pull.unsqueeze(-1)) * spec.scale
            gscore = (gscore if slope is None else gscore * slope).to(q.dtype)
            gv_LGW[there] += (weight.to(go.dtype).mT @ go).sum(1).transpose(0, 1)
            gk_LGK[there] += (gscore.mT @ q).sum(1).transpose(0, 1)
            gq_THK[here] = (gscore @ k).permute(2, 0, 1, 3).flatten(1, 2)
        return gq_THK, gk_LGK.to(k_LGK.dtype), gv_LGW.to(v_LGW.dtype), None, None, None


def _by_group(x_CHE: Tensor, groups: int) -> Tensor:
    """x_GRCE."""
    x_GRCE: Tensor = x_CHE.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    return x_GRCE


def _finite(lse: Tensor) -> Tensor:
    """What scores are shifted by: 0 where a query sees nothing."""
    return lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)


def _scores(
    q_THK: Tensor,
    k_LGK: Tensor,
    chunk: tuple[slice, slice],
    bounds: tuple[int, ...],
    spec: AttendSpec,
    tree: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(scores (G, R, C, L) in float32 at least, -inf where nothing is seen; slope of the cap)."""
    here, there = chunk
    query_C = torch.arange(here.start, here.stop, device=q_THK.device) + spec.first_query
    key_L = torch.arange(there.start, there.stop, device=q_THK.device) + spec.first_key
    seen_CL = sees(query_C, key_L, bounds, spec, tree)
    k_G1LK = k_LGK[there].transpose(0, 1).unsqueeze(1)
    score = upcast(_by_group(q_THK[here], k_LGK.shape[1]) @ k_G1LK.mT) * spec.scale
    slope = None
    if spec.softcap is not None:
        bent = (score / spec.softcap).tanh_()
        score, slope = bent * spec.softcap, 1 - bent.square()
    return score.masked_fill(~seen_CL, -math.inf), slope
