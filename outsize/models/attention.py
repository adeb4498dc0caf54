"""Attention: the two layers that project to queries, keys and values, and the local `Attend`.

Latent attention: Liu et al., DeepSeek-V2, 2024. Sliding windows: Longformer, 2020. Exact always:
windows and caps change which scores are computed, never how well.

T tokens laid flat, D hidden, H query heads, G key-value heads, R = H / G, K head size, W value
size; inside one call B documents, S queries, L keys, C queries of a chunk. Of latent attention: P
plain numbers of a head, N rank of keys and values, L that and the rotary numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.kernels import attention as kernel
from outsize.kernels import rows
from outsize.models.config import DecoderConfig, LayerFacts, Rope
from outsize.models.declared import INSIDE, Lies, Unit
from outsize.models.flash import flash
from outsize.models.layout import chunks, clip, past, stretches, visible
from outsize.models.linear import Linear, dense
from outsize.models.norm import Norm, upcast
from outsize.models.rope import rotate
from outsize.models.seams import MIXERS, AttendSpec, Context, StateSpec


class Attention(nn.Module):
    """x_TD -> y_TD with H query heads over G key-value heads. virtual: by key and value, what
    virtual tokens have in their place (outsize/models/virtual.py)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        facts = config.layers[layer]
        hidden, size, value_size = config.hidden, config.head_size, config.value_size
        bias = config.qkv_bias
        self.head_size, self.value_size = size, value_size
        self.spec = AttendSpec(layer, facts.scale, facts.window, config.softcap)
        self.q = Linear(hidden, config.heads * size, bias, "column", "heads")
        self.k = Linear(hidden, config.kv_heads * size, bias, "column", "kv_heads")
        self.v = Linear(hidden, config.kv_heads * value_size, bias, "column", "kv_heads")
        self.o = Linear(config.heads * value_size, hidden, config.o_bias, "row", "heads")
        self.whole_norm = config.qk_norm == "whole"
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            self.q_norm = self._norm(config, config.heads, "heads")
            self.k_norm = self._norm(config, config.kv_heads, "kv_heads")
        self.rope_name, self.rope = _rope(config, facts)
        self.rotate = rotate
        self.virtual: nn.ModuleDict | None = None

    def _norm(self, config: DecoderConfig, heads: int, unit: Unit) -> Norm:
        """Of a head, or of all at once, which is cut between heads."""
        if self.whole_norm:
            return Norm(heads * self.head_size, config.norm, Lies(0, unit))
        return Norm(self.head_size, config.norm, INSIDE)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        y_TD: Tensor = self.o(self.attended(x_TD, ctx))
        return y_TD

    def attended(self, x_TD: Tensor, ctx: Context) -> Tensor:
        """(T, H W): what the output projection takes."""
        q_THK = self.heads(self.q(x_TD), self.q_norm, ctx)
        k_TGK, v_TGW = self.keys_values(x_TD, ctx)
        return ctx.attend(q_THK, k_TGK, v_TGW, ctx.bounds, self.spec).flatten(-2)

    def keys_values(self, x_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """k_TGK and v_TGW as they are attended to; each token's are its own."""
        k_TGK = self.heads(self.k(x_TD), self.k_norm, ctx)
        v_TGW = self.v(x_TD).unflatten(-1, (-1, self.value_size))
        if self.virtual is None:
            return k_TGK, v_TGW
        return self._own("key", k_TGK, ctx), self._own("value", v_TGW, ctx)

    def _own(self, what: str, x_TGE: Tensor, ctx: Context) -> Tensor:
        """Keys or values, those of virtual tokens their own."""
        assert self.virtual is not None, "there are some"
        own_TE, here_T1 = self.virtual[what](ctx.positions_T)
        return torch.where(here_T1.unsqueeze(2), own_TE.unflatten(1, x_TGE.shape[1:]), x_TGE)

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        heads = self.k.sizes[0] // self.head_size
        return keys_and_values(heads, self.head_size, self.value_size, dtype)

    def leave(self, x_TD: Tensor, ctx: Context) -> None:
        ctx.carry.keep(self.keys_values(x_TD, ctx))

    def heads(self, x: Tensor, norm: Norm | None, ctx: Context) -> Tensor:
        """Queries or keys by head, normed and turned."""
        if norm is not None and self.whole_norm:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_size))
        x = x if norm is None or self.whole_norm else norm(x)
        if self.rope is None or self.rope_name is None:
            return x
        return self.rotate(x, ctx.rope[self.rope_name], self.rope.interleaved)


def keys_and_values(
    heads: int, size: int, value_size: int, dtype: torch.dtype
) -> tuple[StateSpec, ...]:
    """What tokens leave for others to attend to."""
    key = StateSpec("key", (heads, size), dtype, "token")
    return key, StateSpec("value", (heads, value_size), dtype, "token")


def _rope(config: DecoderConfig, facts: LayerFacts) -> tuple[str | None, Rope | None]:
    return facts.rope, None if facts.rope is None else config.ropes[facts.rope]


class LatentAttention(nn.Module):
    """x_TD -> y_TD; keys and values come from one low-rank vector a token, and the rotary part of
    the key is one for all heads.

    Where each token is computed alone, as in serving, attention is over these vectors: queries are
    taken down through the up-projection of keys, results up through that of values. It is the same
    in another order of sums, and tokens leave no more than rank and rotary numbers each.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        facts, latent = config.layers[layer], config.latent
        assert latent is not None, "latent attention needs config.latent"
        hidden, heads, bias = config.hidden, config.heads, config.qkv_bias
        norm = type(config.norm)("rms", latent.eps)
        self.latent, self.head_size, self.value_size = latent, config.head_size, config.value_size
        self.spec = AttendSpec(layer, facts.scale, facts.window, config.softcap)
        self.q_down = self.q_norm = None
        if latent.query_rank is not None:
            self.q_down = Linear(hidden, latent.query_rank, bias, whole=INSIDE)
            self.q_norm = Norm(latent.query_rank, norm, INSIDE)
        into = latent.query_rank or hidden
        self.q = Linear(into, heads * config.head_size, use="column", unit="heads")
        self.kv_down = Linear(hidden, latent.rank + latent.rotary, bias, whole=INSIDE)
        self.kv_norm = Norm(latent.rank, norm, INSIDE)
        each = latent.plain + config.value_size
        self.kv = Linear(latent.rank, heads * each, use="column", unit="heads")
        self.o = Linear(heads * config.value_size, hidden, config.o_bias, "row", "heads")
        self.rope_name, self.rope = _rope(config, facts)
        self.rotate = rotate

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        if not rows.here():
            given = self._queries(x_TD, ctx), *self.keys_values(x_TD, ctx)
            y_TD: Tensor = self.o(ctx.attend(*given, ctx.bounds, self.spec).flatten(-2))
            return y_TD
        from outsize.kernels.heads import by_head  # of few families

        up_HPN, up_HWN = self._up(x_TD)
        k_T1L, v_T1N = self.keys_values(x_TD, ctx)
        spec, q_THL = replace(self.spec, shared=True), self._queries(x_TD, ctx, up_HPN)
        o_THN = ctx.attend(q_THL, k_T1L, v_T1N, ctx.bounds, spec)
        del q_THL  # as large as what comes of them
        y_TD = self.o(by_head(o_THN, up_HWN, False).flatten(-2))
        return y_TD

    def _queries(self, x_TD: Tensor, ctx: Context, up_HPN: Tensor | None = None) -> Tensor:
        """q_THK as they attend to keys, or q_THL to latents."""
        low_TR = x_TD
        if self.q_down is not None and self.q_norm is not None:
            low_TR = self.q_norm(self.q_down(x_TD))
        q_THK = self.q(low_TR).unflatten(-1, (-1, self.head_size))
        q_plain, q_rotary = q_THK.split((self.latent.plain, self.latent.rotary), dim=-1)
        if up_HPN is not None:
            from outsize.kernels.heads import by_head  # of few families

            q_plain = by_head(q_plain, up_HPN, True)
        return torch.cat((q_plain, self._turned(q_rotary, ctx)), dim=-1)

    def _turned(self, x_THR: Tensor, ctx: Context) -> Tensor:
        assert self.rope is not None and self.rope_name is not None, "latent attention has a rope"
        return self.rotate(x_THR, ctx.rope[self.rope_name], self.rope.interleaved)

    def keys_values(self, x_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """k_THK and v_THW as they are attended to; each token's are its own. Where tokens are
        computed alone k_T1L and v_T1N."""
        plain, rank = self.latent.plain, self.latent.rank
        kv_TN, k_rotary = self.kv_down(x_TD).split((rank, self.latent.rotary), dim=-1)
        kv_TN, k_rotary = self.kv_norm(kv_TN), self._turned(k_rotary.unsqueeze(1), ctx)
        if rows.here():
            k_T1L = torch.cat((kv_TN.unsqueeze(1), k_rotary), dim=-1)
            return k_T1L, k_T1L[..., :rank]
        kv_THX = self.kv(kv_TN).unflatten(-1, (-1, plain + self.value_size))
        k_plain, v_THW = kv_THX.split((plain, self.value_size), dim=-1)
        return torch.cat((k_plain, k_rotary.expand(-1, k_plain.shape[1], -1)), dim=-1), v_THW

    def _up(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """up_HPN and up_HWN, what takes a latent to each head's plain part of a key, and value."""
        one, bare = self.kv, self.kv.beside is None and not torch.is_grad_enabled()
        if bare and one.coded is not None:
            weight = one.decoded(0, one.sizes[0], like.dtype)
        elif bare and one.product is dense:
            weight = one.weight
        else:  # what makes more of the product, or learns from it
            weight = one(torch.eye(self.latent.rank, dtype=like.dtype, device=like.device))
            weight = weight.t().contiguous()
        sizes = self.latent.plain, self.value_size
        up_HPN, up_HWN = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        return up_HPN, up_HWN

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        size = self.latent.rank + self.latent.rotary
        return (StateSpec("latent", (1, size), dtype, "token"),)

    def leave(self, x_TD: Tensor, ctx: Context) -> None:
        ctx.carry.keep(self.keys_values(x_TD, ctx))


MIXERS.add("attention", Attention)
MIXERS.add("latent attention", LatentAttention)


class LocalAttend:
    """All keys are here; whatever the spec asks.

    Causal attention uses our own or PyTorch's fused kernel wherever that can say what is asked;
    memory and time are proportional to T * window where a window is shorter than a document. What
    no kernel can say is done in plain PyTorch (outsize/models/masked.py).
    """

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        queries, keys = q_THK.shape[0], k_TGK.shape[0]
        if not spec.in_order or spec.first_key or spec.first_query + queries > keys:
            from outsize.models.masked import attend_masked  # of specs that are not plain

            return attend_masked(q_THK, k_TGK, v_TGW, bounds, spec)[0]
        if not queries:
            return q_THK.new_empty((0, q_THK.shape[1], v_TGW.shape[2]))
        cpu = q_THK.device.type == "cpu"
        if queries == keys and cpu and spec.softcap is None:
            return flash(q_THK, k_TGK, v_TGW, bounds, spec.scale, spec.window)
        if cpu and kernel.fits(q_THK, k_TGK, v_TGW, spec.softcap):
            return _behind(q_THK, k_TGK, v_TGW, bounds, spec)
        start, outputs = spec.first_query, []
        for here, there, documents in stretches(bounds, start, start + queries):
            cut = (q_THK[here], k_TGK[there], v_TGW[there])
            q, k, v = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in cut)
            outputs.append(attend(q, k, v, spec).transpose(1, 2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _behind(
    q_THK: Tensor, k_LGK: Tensor, v_LGW: Tensor, bounds: tuple[int, ...], spec: AttendSpec
) -> Tensor:
    """Queries that are a stretch of the tokens, by our kernel. Its queries begin a tile: zeros lie
    before the first one, give nothing and get no gradient."""
    start, stop = spec.first_query, spec.first_query + q_THK.shape[0]
    before = past(bounds, start)
    low, lead = start - before, before % kernel.BLOCK
    seen = (k_LGK[low:stop], v_LGW[low:stop], clip(bounds, low, stop))
    q_THK = F.pad(q_THK, (0, 0, 0, 0, lead, 0)) if lead else q_THK
    return kernel.attend(q_THK, *seen, spec.scale, spec.window, spec.softcap)[lead:]


def attend(q_BHSK: Tensor, k_BGLK: Tensor, v_BGLW: Tensor, spec: AttendSpec) -> Tensor:
    """o_BHSW of queries that are the last S of the L tokens whose keys and values are here."""
    length = k_BGLK.shape[2]
    past = length - q_BHSK.shape[2]
    window = None if spec.window is None or spec.window >= length else spec.window
    if spec.softcap is not None:
        o: Tensor = _Capped.apply(q_BHSK, k_BGLK, v_BGLW, spec.scale, window, spec.softcap)  # type: ignore[no-untyped-call]
        return o
    if window is None and not past:
        return _fused(q_BHSK, k_BGLK, v_BGLW, spec.scale, None)
    pieces = []
    for start, stop, low in chunks(length, window, past):
        mask_CL = visible(start, stop, low, window, q_BHSK.device)
        k, v = k_BGLK[:, :, low:stop], v_BGLW[:, :, low:stop]
        pieces.append(_fused(q_BHSK[:, :, start - past : stop - past], k, v, spec.scale, mask_CL))
    return torch.cat(pieces, dim=2)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Fused kernels want one head size for keys and values: zeros are added and cut off."""
    size, value_size = q.shape[-1], v.shape[-1]
    if value_size < size:
        v = F.pad(v, (0, size - value_size))
    elif value_size > size:
        q, k = F.pad(q, (0, value_size - size)), F.pad(k, (0, value_size - size))
    grouped = q.shape[1] != k.shape[1]
    if grouped and not _shares_heads(q, mask):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    o = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return o[..., :value_size] if value_size < size else o


def _shares_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel reads one key head for several query heads. On a GPU only flash
    attention does, in half precision and without a mask; asked otherwise, PyTorch makes all S x S
    scores."""
    return q.device.type == "cpu" or (mask is None and q.dtype in (torch.float16, torch.bfloat16))


class _Capped(torch.autograd.Function):
    """Attention with capped scores, a chunk of queries at a time; the backward makes a chunk's
    scores again, so that no more than one chunk's scores exist at once. The queries are the last S
    of L tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSK: Tensor,
        k_BGLK: Tensor,
        v_BGLW: Tensor,
        scale: float,
        window: int | None,
        cap: float,
    ) -> Tensor:
        ctx.save_for_backward(q_BHSK, k_BGLK, v_BGLW)
        ctx.facts = (scale, window, cap)
        length = k_BGLK.shape[2]
        past = length - q_BHSK.shape[2]
        q_BGRSK = q_BHSK.unflatten(1, (k_BGLK.shape[1], -1))
        o_BGRSW = q_BGRSK.new_empty((*q_BGRSK.shape[:-1], v_BGLW.shape[-1]))
        for start, stop, low in chunks(length, window, past):
            k, v = k_BGLK[:, :, None, low:stop], v_BGLW[:, :, None, low:stop]
            here = slice(start - past, stop - past)
            weight, _ = _capped_weights(q_BGRSK[:, :, :, here], k, (start, stop, low), ctx.facts)
            o_BGRSW[:, :, :, here] = weight.to(v.dtype) @ v
        o_BHSW: Tensor = o_BGRSW.flatten(1, 2)
        return o_BHSW

    @staticmethod
    def backward(ctx: Any, go_BHSW: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q_BHSK, k_BGLK, v_BGLW = ctx.saved_tensors
        scale, window, _ = ctx.facts
        groups, length = k_BGLK.shape[1:3]
        past = length - q_BHSK.shape[2]
        q_BGRSK, go_BGRSW = q_BHSK.unflatten(1, (groups, -1)), go_BHSW.unflatten(1, (groups, -1))
        gq = torch.empty_like(q_BGRSK)
        gk, gv = torch.zeros_like(upcast(k_BGLK)), torch.zeros_like(upcast(v_BGLW))
        for start, stop, low in chunks(length, window, past):
            k, v = k_BGLK[:, :, None, low:stop], v_BGLW[:, :, None, low:stop]
            here = slice(start - past, stop - past)
            q, go = q_BGRSK[:, :, :, here], go_BGRSW[:, :, :, here]
            weight, slope = _capped_weights(q, k, (start, stop, low), ctx.facts)
            gv[:, :, low:stop] += (weight.to(go.dtype).mT @ go).sum(2)
            gweight = upcast(go @ v.mT)
            gscore = weight * (gweight - (gweight * weight).sum(-1, keepdim=True))
            gscore = gscore.mul_(slope).mul_(scale).to(q.dtype)
            gq[:, :, :, here] = gscore @ k
            gk[:, :, low:stop] += (gscore.mT @ q).sum(2)
        gradients = gq.flatten(1, 2), gk.to(k_BGLK.dtype), gv.to(v_BGLW.dtype)
        return *gradients, None, None, None


def _capped_weights(
    q: Tensor,
    k: Tensor,
    chunk: tuple[int, int, int],
    facts: tuple[float, int | None, float],
) -> tuple[Tensor, Tensor]:
    """(softmax weights, slope of the cap) of a chunk, both (B, G, R, C, L), float32 at least."""
    scale, window, cap = facts
    bent = (upcast(q @ k.mT) * (scale / cap)).tanh_()
    seen_CL = visible(*chunk, window, q.device)
    weight = (bent * cap).masked_fill_(~seen_CL, float("-inf")).softmax(-1)
    return weight, 1 - bent.square_()
