"""Attention of a chunk of a sequence to itself and to all that came before, forward and back.

The chunks of a sequence are run one at a time. `Left` holds the keys and values of the whole
sequence; `ChunkAttend` stands at the `Attend` seam for one chunk, so a block runs as it is written.
Going back, chunks are differentiated from the last to the first: when a chunk's turn comes, every
later query has added to the gradients of its keys and values, which then go through the chunk's own
projections at once. (Luo et al., "StreamBP: Memory-Efficient Exact Backpropagation for Long
Sequence Training of LLMs", 2025, whose chunks go first to last and keep the graph of all keys.)

The chunk is seen as the last queries of its tokens. On a CPU our kernel adds to the gradients of
keys and values itself.

T tokens of the sequences laid flat, C of a chunk, H query heads, G key-value heads, K head size, W
value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels import attention as kernel
from outsize.models.attention import LocalAttend
from outsize.models.chunk import Left, Part
from outsize.models.seams import AttendSpec


@dataclass(frozen=True)
class ChunkAttend:
    """The `Attend` of the tokens from `start` on; see the head of this file.

    Without gradients it stores the keys and values it is given. With them, those of all tokens up
    to the chunk's end must be there, and the chunk's come back with what later chunks have added.
    """

    held: Left
    start: int

    def __call__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGW: Tensor,
        bounds: tuple[int, ...],
        spec: AttendSpec,
    ) -> Tensor:
        assert spec.plain, "chunks of a sequence run in its order"
        return attended(q_THK, k_TGK, v_TGW, self.held, self.start, spec)


Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # o of queries, keys and values


def attended(
    q_CHK: Tensor,
    k_CGK: Tensor,
    v_CGW: Tensor,
    held: Left,
    start: int,
    spec: AttendSpec,
    run: Run | None = None,
) -> Tensor:
    """o_CHW of the tokens from `start` on. run: how the chunk's queries attend to the keys and
    values up to its end; None: causally, in their documents."""
    if not torch.is_grad_enabled() and not held.given:
        held.put(start, k_CGK, v_CGW)
    part = Part(held, start, start + q_CHK.shape[0], spec)
    inputs = (q_CHK, k_CGK, v_CGW)
    o: Tensor
    native = run is None and q_CHK.device.type == "cpu"
    if native and kernel.fits(q_CHK, *held.values, spec.softcap):
        o = _Native.apply(*inputs, part)  # type: ignore[no-untyped-call]
    else:
        o = _Any.apply(*inputs, part, run or partial(_local, part))  # type: ignore[no-untyped-call]
    return o


def _local(part: Part, q_CHK: Tensor, k_LGK: Tensor, v_LGW: Tensor) -> Tensor:
    spec = replace(part.spec, first_query=part.past)
    return LocalAttend()(q_CHK, k_LGK, v_LGW, part.bounds, spec)


# -- any device: the attention of whole documents, its graph kept --------------------------------


class _Any(torch.autograd.Function):
    """The chunk as the last queries of its tokens; the graph is held until the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q_CHK: Tensor, k_CGK: Tensor, v_CGW: Tensor, part: Part, run: Run
    ) -> Tensor:
        train = any(ctx.needs_input_grad)
        q, k, v = leaves = [
            x.detach().requires_grad_(train) for x in (q_CHK, *part.seen(part.held.values))
        ]
        with torch.set_grad_enabled(train):
            o = run(q, k, v)
        ctx.part, ctx.made = part, [(o, leaves)] if train else []
        return o.detach()

    @staticmethod
    def backward(ctx: Any, go_CHW: Tensor) -> tuple[Tensor | None, ...]:
        o, (q_CHK, *others) = ctx.made.pop()
        torch.autograd.backward(o, go_CHW)
        for total, x in zip(ctx.part.seen(ctx.part.held.gradients), others, strict=True):
            total += x.grad
        return q_CHK.grad, *ctx.part.own_gradients(), None, None


# -- a CPU: our own kernel ---------------------------------------------------------------------


class _Native(torch.autograd.Function):
    """One call for all documents of the chunk; the kernel adds to the gradients of keys itself."""

    @staticmethod
    def forward(ctx: Any, q_CHK: Tensor, k_CGK: Tensor, v_CGW: Tensor, part: Part) -> Tensor:
        ctx.lead = part.past % kernel.BLOCK  # queries begin a tile: there are some before the first
        q = _behind(ctx.lead, q_CHK)
        made = torch.ops.outsize.attention.default(q, *part.seen(part.held.values), *_sight(part))
        o, lse = made
        ctx.save_for_backward(q, o, lse)
        ctx.part = part
        o_CHW: Tensor = o[ctx.lead :]
        return o_CHW

    @staticmethod
    def backward(ctx: Any, go_CHW: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse = ctx.saved_tensors
        part: Part = ctx.part
        go = _behind(ctx.lead, go_CHW if go_CHW.stride(2) == 1 else go_CHW.contiguous())
        values, gradients = (part.seen(x) for x in (part.held.values, part.held.gradients))
        gq = torch.ops.outsize.attention_backward_into.default(
            go, q, *values, o, lse, gradients, *_sight(part)
        )
        return gq[ctx.lead :].to(q.dtype), *part.own_gradients(), None


def _behind(lead: int, x_CHE: Tensor) -> Tensor:
    """With `lead` tokens of zeros before the first; they get no gradient and give none."""
    return F.pad(x_CHE, (0, 0, 0, 0, lead, 0)) if lead else x_CHE


def _sight(part: Part) -> tuple[tuple[int, ...], float, int | None, float | None]:
    return part.bounds, part.spec.scale, part.spec.window, part.spec.softcap
