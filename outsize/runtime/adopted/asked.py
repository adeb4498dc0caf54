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

from outsize.kernels import native
from outsize.kernels.entropy import IGNORE, LossOptions, by_token, check, plain
from outsize.kernels.loss import Head, Targets, wide
from outsize.runtime.casts import Casts

Each = Callable[[Tensor], Tensor]  # of the logits of some tokens, a token by itself
Finish = Callable[[Tensor, Tensor], Tensor]  # of logits and of what is asked of them, by token


@dataclass(frozen=True)
class Cast:
    """Of logits to another type."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@dataclass(frozen=True)
class Entropy:
    """The cross-entropy of a class for each token, as PyTorch's: a Finish. In place of logits that
    nobody else has it takes no memory, where it holds at least float32."""

    ignored: int
    smoothing: float

    def __call__(self, logits_CV: Tensor, target_C: Tensor) -> Tensor:
        return F.cross_entropy(
            logits_CV, target_C, ignore_index=self.ignored, reduction="none",
            label_smoothing=self.smoothing,
        )  # fmt: skip

    def over(self, logits_CV: Tensor, target_C: Tensor) -> Tensor:
        """The same; logits are written over."""
        ids_C = self._ids(target_C)
        if ids_C.is_cpu:
            check(ids_C, logits_CV.shape[1])
        return by_token(logits_CV, ids_C, LossOptions(self.smoothing))

    def turned(
        self, logits_CV: Tensor, target_C: Tensor, g_C: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """The gradient by logits that are computed with in `dtype`; they are written over."""
        targets = Targets(self._ids(target_C), g_C)
        options = LossOptions(self.smoothing)
        if not self.smoothing and native.fits(logits_CV, by="cross_entropy"):
            Head(1.0, len(logits_CV), None).fused(logits_CV, targets, True)
            return logits_CV
        wide_CV = logits_CV.to(dtype)
        plain(wide_CV, targets, 1.0, True, options)
        return wide_CV.to(logits_CV.dtype)

    def _ids(self, target_C: Tensor) -> Tensor:
        other_C = target_C.masked_fill(target_C == IGNORE, -1)  # no token, where others are ignored
        return other_C.masked_fill(target_C == self.ignored, IGNORE)


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
            return self.finish(self._each(logits_CV), asked_C)

    def over(self, logits_CV: Tensor, asked_C: Tensor) -> Tensor:
        """As `of`, without a gradient, of logits that nobody asks for afterwards."""
        with self.casts.within():
            logits_CV = self._each(logits_CV)
            if isinstance(self.finish, Entropy) and logits_CV.dtype == wide(logits_CV.dtype):
                return self.finish.over(logits_CV, asked_C)
            return self.finish(logits_CV, asked_C)

    def gradient(self, logits_CV: Tensor, asked_C: Tensor, g_C: Tensor) -> Tensor:
        """By logits that nobody asks for afterwards."""
        last = next((one for one in reversed(self.each) if isinstance(one, Cast)), None)
        dtype = logits_CV.dtype if last is None else last.dtype
        casts = all(isinstance(one, Cast) for one in self.each) and dtype == wide(dtype)
        if isinstance(self.finish, Entropy) and casts:
            return self.finish.turned(logits_CV, asked_C, g_C, dtype)
        logits_CV.requires_grad_()
        with torch.enable_grad():
            made = self.of(logits_CV, asked_C)
        (g_CV,) = torch.autograd.grad(made, logits_CV, g_C)
        return g_CV

    def _each(self, logits_CV: Tensor) -> Tensor:
        for one in self.each:
            logits_CV = one(logits_CV)
        return logits_CV


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
            made.append(work.over(work.logits(x_TD[here], weight_VD, bias_V), asked_T[here]))
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
            logits_CV = work.logits(x_CD, weight_VD, bias_V).detach()
            g_CV = work.gradient(logits_CV, asked_T[here], g_T[here])
            del logits_CV
            if gx_TD is not None:
                gx_TD[here] = g_CV @ weight_VD.to(g_CV.dtype)
            if gw_VD is not None:
                if gw_VD.dtype == g_CV.dtype == x_CD.dtype:
                    gw_VD.addmm_(g_CV.t(), x_CD)
                else:
                    gw_VD += g_CV.t() @ x_CD.to(g_CV.dtype)
            if gb_V is not None:
                gb_V += g_CV.sum(0)
            del g_CV  # before the next ones are there
        gw = None if gw_VD is None else gw_VD.to(weight_VD.dtype)
        gb = None if gb_V is None or bias_V is None else gb_V.to(bias_V.dtype)
        return gx_TD, gw, gb, None, None


def in_chunks(
    x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, asked_T: Tensor, work: Work
) -> Tensor:
    """What work does of each token: (T, *). asked_T: (T, *) too."""
    made: Tensor = _InChunks.apply(x_TD, weight_VD, bias_V, asked_T, work)  # type: ignore[no-untyped-call]
    return made
