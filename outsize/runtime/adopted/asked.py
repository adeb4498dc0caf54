"""What is asked of logits, a chunk of tokens at a time, forward and back, from the hidden states.

T tokens, C of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels.loss import wide
from outsize.runtime.casts import Casts

Each = Callable[[Tensor], Tensor]  # of the logits of some tokens, a token by itself
Finish = Callable[[Tensor, Tensor], Tensor]  # of logits and of what is asked of them, by token


@dataclass(frozen=True)
class Work:
    """What is done for each token: its logits, `each` of them in turn, `finish`."""

    chunk: int
    casts: Casts
    each: tuple[Each, ...]
    finish: Finish

    def logits(self, x_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        with self.casts.within():
            return F.linear(x_CD, weight_VD, bias_V)

    def of(self, logits_CV: Tensor, asked_C: Tensor) -> Tensor:
        with self.casts.within():
            for one in self.each:
                logits_CV = one(logits_CV)
            return self.finish(logits_CV, asked_C)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        asked_T: Tensor,
        work: Work,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight_VD, bias_V, asked_T)
        ctx.work = work
        made = []
        for start in range(0, x_TD.shape[0], work.chunk):
            here = slice(start, start + work.chunk)
            made.append(work.of(work.logits(x_TD[here], weight_VD, bias_V), asked_T[here]))
        return torch.cat(made)

    @staticmethod
    def backward(ctx: Any, g_T: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_VD, bias_V, asked_T = ctx.saved_tensors
        work, dtype = ctx.work, wide(weight_VD.dtype)
        wants = ctx.needs_input_grad[:3]
        gx_TD = torch.empty_like(x_TD) if wants[0] else None
        gw_VD = torch.zeros_like(weight_VD, dtype=dtype) if wants[1] else None
        gb_V = None if bias_V is None or not wants[2] else torch.zeros_like(bias_V, dtype=dtype)
        for start in range(0, x_TD.shape[0], work.chunk):
            here = slice(start, start + work.chunk)
            x_CD = x_TD[here]
            logits_CV = work.logits(x_CD, weight_VD, bias_V).detach().requires_grad_()
            with torch.enable_grad():
                made = work.of(logits_CV, asked_T[here])
            (g_CV,) = torch.autograd.grad(made, logits_CV, g_T[here])
            del logits_CV, made
            if gx_TD is not None:
                gx_TD[here] = g_CV @ weight_VD.to(g_CV.dtype)
            if gw_VD is not None:
                if gw_VD.dtype == g_CV.dtype == x_CD.dtype:
                    gw_VD.addmm_(g_CV.t(), x_CD)
                else:
                    gw_VD += g_CV.t() @ x_CD.to(g_CV.dtype)
            if gb_V is not None:
                gb_V += g_CV.sum(0)
        gw = None if gw_VD is None else gw_VD.to(weight_VD.dtype)
        gb = None if gb_V is None or bias_V is None else gb_V.to(bias_V.dtype)
        return gx_TD, gw, gb, None, None


def in_chunks(
    x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, asked_T: Tensor, work: Work
) -> Tensor:
    """What work does of each token: (T, *). asked_T: (T, *) too."""
    made: Tensor = _InChunks.apply(x_TD, weight_VD, bias_V, asked_T, work)  # type: ignore[no-untyped-call]
    return made
