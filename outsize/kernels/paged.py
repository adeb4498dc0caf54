"""Attention over pages on a device, each token alone, by tables that lie there: what a step sees is
data, so that its work can be recorded once and played again (outsize/decode/graphs.py).

On NVIDIA, AMD and Intel devices it is a kernel of paged_kernels.py, after the split of a long cache
into pieces whose results are put together afterwards (Dao et al., "Flash-Decoding", 2023). A piece
has always PIECE tokens: what a token gets depends on neither the others of its step nor the room.

T tokens, H query heads, G key-value heads, R = H / G, K and W head sizes of keys and values, P
pages of a row of the tables, L = P times the tokens of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator
from outsize.kernels import native
from outsize.kernels.norm import upcast
from outsize.kernels.pages import EVERY, Pool, decoded

PIECE = 256  # tokens
FAR = 1 << 30  # more than any context has: positions are int32


@dataclass(frozen=True)
class Sights:
    """What the tokens of a step see, on their device. tables_TP: the pages of each one's sequence,
    int32; positions_T: its place there, int32. Entries behind its own page are not read."""

    tables_TP: Tensor
    positions_T: Tensor


def pieces(tokens: int) -> int:
    """How many have room for so many tokens."""
    return -(-tokens // PIECE)


def flat(tables: Sequence[Sequence[int]], positions: Sequence[int], width: int) -> list[int]:
    """What `sights` reads: the tables, of `width` pages each, then the positions."""
    found = list[int]()
    for pages in tables:
        some = pages[:width]
        found += some
        found += (0,) * (width - len(some))
    found += positions
    return found


def sights(numbers_N: Tensor, width: int) -> Sights:
    """Views of what `flat` gave."""
    count = numbers_N.numel() // (width + 1)
    tables_N, positions_T = numbers_N.split((count * width, count))
    return Sights(tables_N.view(count, width), positions_T)


def served(q_THK: Tensor, keys: Pool) -> bool:
    """Whether a device attends so."""
    return (
        accelerator.queues(q_THK.device)
        and q_THK.dtype is keys.dtype
        and accelerator.runs("outsize::paged", q_THK.device)
    )


def attend(
    q_THK: Tensor,
    keys: Pool,
    values: Pool,
    seen: Sights,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """o_THW: each token over those of its sequence up to itself, the last `window` of them."""
    held = ([x for x in (one.data, one.scales) if x is not None] for one in (keys, values))
    o_THW: Tensor = torch.ops.outsize.paged.default(
        q_THK, *held, seen.tables_TP, seen.positions_T,
        (keys.form.bits, values.size, min(window or EVERY, FAR)), (scale, softcap or 0.0),
    )  # fmt: skip
    return o_THW


def _allocate(
    q_THK: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    tables_TP: Tensor,
    positions_T: Tensor,
    sizes: Sequence[int],
    facts: Sequence[float],
) -> Tensor:
    return q_THK.new_empty((*q_THK.shape[:2], sizes[1]))


@torch.no_grad()
def plain(
    q_THK: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    tables_TP: Tensor,
    positions_T: Tensor,
    sizes: Sequence[int],
    facts: Sequence[float],
) -> Tensor:
    """The twin: all pages of the tables are gathered, whatever is seen of them. keys, values: of a
    pool, its scales behind. sizes: bits of a code, size of a value, window; facts: scale, cap of
    scores or 0."""
    (bits, size, window), (scale, softcap), pages_TP = sizes, facts, tables_TP.long()

    def gathered(held: Sequence[Tensor], size: int) -> Tensor:
        """(T, G, L, size)"""
        some, *scales = (x[pages_TP] for x in held)
        if scales:
            some = decoded(some, scales[0], bits, size)
        return some[..., :size].to(q_THK.dtype).flatten(1, 2).transpose(1, 2)

    k_TGLK, v_TGLW = gathered(keys, q_THK.shape[-1]), gathered(values, size)
    q_TGRK = q_THK.unflatten(1, (k_TGLK.shape[1], -1))
    place_L = torch.arange(k_TGLK.shape[2], device=q_THK.device)
    last_T1 = positions_T.unsqueeze(1)
    seen_T11L = ((place_L <= last_T1) & (place_L > last_T1 - window))[:, None, None]
    v_TGLW = v_TGLW.masked_fill(~seen_T11L.mT, 0)  # whatever pages of nobody hold
    k_TGLK = k_TGLK.masked_fill(~seen_T11L.mT, 0)
    if not softcap:
        return F.scaled_dot_product_attention(
            q_TGRK, k_TGLK, v_TGLW, seen_T11L, scale=scale
        ).flatten(1, 2)
    scores: Tensor = upcast(q_TGRK @ k_TGLK.mT) * (scale / softcap)
    scores = (scores.tanh_() * softcap).masked_fill_(~seen_T11L, -torch.inf)
    return (scores.softmax(-1).to(q_THK.dtype) @ v_TGLW).flatten(1, 2)


def _on_device(
    q_THK: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    tables_TP: Tensor,
    positions_T: Tensor,
    sizes: Sequence[int],
    facts: Sequence[float],
) -> Tensor:
    """float64, narrow codes and latents by PyTorch's operators."""
    if q_THK.dtype is torch.float64 or len(keys) > 1 or values[0].shape[-1] != sizes[1]:
        return plain(q_THK, keys, values, tables_TP, positions_T, sizes, facts)
    o_THW = _allocate(q_THK, keys, values, tables_TP, positions_T, sizes, facts)
    seen = Sights(tables_TP, positions_T)
    native.kernels("paged").attend(
        q_THK.contiguous(), keys[0], values[0], seen, sizes[2], tuple(facts), o_THW
    )
    return o_THW


_OPERATORS = (
    native.define(
        "paged(Tensor q, Tensor[] keys, Tensor[] values, Tensor tables, Tensor positions,"
        " int[] sizes, float[] facts) -> Tensor",
        plain,
        _allocate,
        _on_device,
    ),
)
