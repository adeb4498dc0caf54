"""Causal attention of packed documents on a processor: attention.cpp; in float64, attention64.cpp.

PyTorch's flash kernel on a CPU reaches a quarter to a half of the speed of a matrix product and is
called once for each stretch of documents of one length; this is one call for all of them, whatever
their lengths, reads heads where they lie and copies nothing. Its twin is `outsize.models.flash`.

T tokens laid flat, H query heads, G key-value heads, K head size, W value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.kernels import native
from outsize.torch_private import enter

WIDTH = 256  # the largest head size, as in tiles.h
BLOCK = 64  # tokens of a tile, as in tiles.h
_EVERY = 1 << 40  # a window that hides nothing


def fits(q_THK: Tensor, k_TGK: Tensor, v_TGW: Tensor, softcap: float | None = None) -> bool:
    """Whether `attend` takes these: tokens and heads may lie apart, numbers of a head may not. In
    float64 it caps no scores."""
    inputs, dtype = (q_THK, k_TGK, v_TGW), q_THK.dtype
    for x in inputs:
        if x.dtype is not dtype or x.stride(2) != 1 or not 0 < x.size(2) <= WIDTH:
            return False
    if dtype is torch.float64:
        return softcap is None and native.lies(*inputs)
    return native.reads(*inputs)


def attend(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGW: Tensor,
    bounds: tuple[int, ...],
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """o_THW, dtype as q: inside each document, each token over those before it and itself, the
    last `window` of them. softcap c turns a score s into c * tanh(s / c)."""
    o: Tensor = enter(_Attention, q_THK, k_TGK, v_TGW, bounds, scale, window, softcap)
    return o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        *facts: float | None,
    ) -> Tensor:
        inputs = (q_THK, k_TGK, v_TGW)
        made = _run if native.bare(q_THK) else torch.ops.outsize.attention.default
        o_THW: Tensor
        o_THW, lse_HT = made(*inputs, bounds, *facts)
        ctx.save_for_backward(*inputs, o_THW, lse_HT)
        ctx.facts = (bounds, *facts)
        return o_THW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, go_THW: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if go_THW.stride(2) != 1:
            go_THW = go_THW.contiguous()
        fused = torch.ops.outsize.attention_backward.default
        pull = _run_backward if native.bare(go_THW) else fused
        gradients = pull(go_THW, *saved, *ctx.facts)
        if gradients[0].dtype == go_THW.dtype:
            return *gradients, None, None, None, None
        narrow = (g.to(x.dtype) for g, x in zip(gradients, saved, strict=False))
        return *narrow, None, None, None, None


def _sums(x: Tensor) -> torch.dtype:
    """In which sums are made and given."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _allocate(q: Tensor, k: Tensor, v: Tensor, *facts: object) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    lse_HT = q.new_empty((heads, tokens), dtype=_sums(q))
    return q.new_empty((tokens, heads, v.shape[2])), lse_HT


def _run(q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> tuple[Tensor, Tensor]:
    o, lse = _allocate(q, k, v)
    if q.dtype is torch.float64:
        native.loaded().outsize_float64_attention(
            *_addresses(q, k, v), o.data_ptr(), lse.data_ptr(), *_float64_facts(q, k, v, *asked)
        )
        return o, lse
    native.loaded().outsize_attention(
        *(native.CODES[q.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(), _strides(q, k, v)),
        *(o.data_ptr(), lse.data_ptr(), *_facts(q, k, v, *asked), native.threads()),
    )
    return o, lse


def _allocate_backward_into(go: Tensor, q: Tensor, *_: object) -> Tensor:
    """gq as a sum; what the call gives keys and values is added to the sums, theirs."""
    return q.new_zeros(q.shape, dtype=_sums(q))


def _run_backward_into(
    go: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sums: Sequence[Tensor],
    *asked: Any,
) -> Tensor:
    assert all(g.is_contiguous() and g.dtype == _sums(q) for g in sums)
    gq, inputs = _allocate_backward_into(go, q), (go, q, k, v, o)
    if q.dtype is torch.float64:
        native.loaded().outsize_float64_attention_backward(
            *(*_addresses(q, k, v, go, o), lse.data_ptr(), gq.data_ptr()),
            *(*(g.data_ptr() for g in sums), *_float64_facts(q, k, v, *asked)),
        )
        return gq
    native.loaded().outsize_attention_backward(
        *(native.CODES[q.dtype], native.numbers(x.data_ptr() for x in inputs)),
        *(_strides(*inputs), lse.data_ptr(), gq.data_ptr(), *(g.data_ptr() for g in sums)),
        *(*_facts(q, k, v, *asked), native.threads()),
    )
    return gq


def _allocate_backward(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over keys and queries: float32 for narrower inputs too."""
    gq, gk, gv = (x.new_zeros(x.shape, dtype=_sums(x)) for x in (q, k, v))
    return gq, gk, gv


def _run_backward(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *asked: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gk, gv = (x.new_zeros(x.shape, dtype=_sums(x)) for x in (k, v))
    return _run_backward_into(go, q, k, v, o, lse, (gk, gv), *asked), gk, gv


def _strides(*heads: Tensor) -> bytes:
    """Of a token and of a head, in elements."""
    return native.numbers(stride for x in heads for stride in x.stride()[:2])


def _addresses(*heads: Tensor) -> tuple[bytes, bytes]:
    """Of three or five inputs, none behind the last, and their strides."""
    return native.numbers((*(x.data_ptr() for x in heads), 0)), _strides(*heads)


def _float64_facts(
    q: Tensor, k: Tensor, v: Tensor, *asked: Any
) -> tuple[bytes, bytes, int, float, int]:
    """As attention64.cpp has them."""
    facts, bounds, documents, scale, softcap = _facts(q, k, v, *asked)
    assert not softcap, "scores are not capped in float64"
    return facts, bounds, documents, scale, native.threads()


def _facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> tuple[bytes, bytes, int, float, float]:
    """As attention.cpp has them: numbers, the bounds of documents, how many these are, the factor
    on scores and their cap."""
    (queries, heads, size), (keys, groups, _) = q.shape, k.shape
    past = keys - queries
    assert past >= 0 and past % BLOCK == 0, "the first query begins a tile"
    assert bounds[0] >= 0 and bounds[-1] <= keys, "documents lie in the tokens"
    window = _EVERY if window is None else window
    facts = native.numbers((queries, heads, groups, size, v.size(2), window, past))
    return facts, native.numbers(bounds), len(bounds) - 1, scale, softcap or 0.0


# Where there are more keys than queries, the queries are the last of the tokens.
_INPUTS = "Tensor q, Tensor k, Tensor v"
_FACTS = "int[] bounds, float scale, int? window, float? softcap=None"
_OPERATORS = (
    native.define(f"attention({_INPUTS}, {_FACTS}) -> (Tensor, Tensor)", _run, _allocate),
    native.define(
        f"attention_backward(Tensor go, {_INPUTS}, Tensor o, Tensor lse, {_FACTS})"
        " -> (Tensor, Tensor, Tensor)",
        _run_backward,
        _allocate_backward,
    ),
    native.define(
        f"attention_backward_into(Tensor go, {_INPUTS}, Tensor o, Tensor lse, Tensor(a!)[] sums,"
        f" {_FACTS}) -> Tensor",
        _run_backward_into,
        _allocate_backward_into,
    ),
)
