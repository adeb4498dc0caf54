"""Cross-entropy over token chunks, the backward pass inside each chunk.

The logits of a language model are its largest tensor by far: T x V against T x D. Here a chunk of
tokens is multiplied by the head, turned into its loss and at once into its gradient, in place, in
one buffer that every chunk uses again; full logits never exist, in either direction. (The idea of
computing the gradient in the forward pass is that of Hsu et al., "Liger Kernel", 2024; a chunked
loss with one backward at its end would keep every chunk alive.) Where the fused pass of native.cpp
serves, the buffer has the dtype of the model; else it is float32 at least.

T tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.kernels import native, product, rows
from outsize.kernels.entropy import (
    IGNORE,
    PLAIN,
    Loss,
    LossOptions,
    Targets,
    Vocabulary,
    check,
    plain,
)
from outsize.kernels.linear import GradSink, add_product
from outsize.torch_private import enter

__all__ = [
    "IGNORE",
    "Head",
    "Loss",
    "LossOptions",
    "Targets",
    "Vocabulary",
    "chunked_loss",
    "plain",
    "wide",
]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which reductions over `dtype` are done: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logits(h_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, out_CV: Tensor) -> None:
    """out = h @ weight.T + bias, in the dtype of out."""
    if rows.wanted(h_CD, weight_VD):
        if out_CV.dtype == h_CD.dtype:
            rows.put(h_CD, weight_VD, bias_V, out_CV)
        else:
            out_CV.copy_(rows.linear(h_CD, weight_VD, bias_V))
    elif out_CV.dtype != h_CD.dtype:
        out_CV.copy_(h_CD @ weight_VD.t())
        if bias_V is not None:
            out_CV.add_(bias_V)
    elif bias_V is None:
        product.put_product(h_CD, weight_VD.t(), out_CV)
    else:
        torch.addmm(bias_V, h_CD, weight_VD.t(), out=out_CV)


def soften(logits_CV: Tensor, scale: float, softcap: float | None) -> Tensor | None:
    """Scale and soft-cap in place; gives the tanh that the backward pass needs, if any."""
    if scale != 1.0:
        logits_CV.mul_(scale)
    if softcap is None:
        return None
    tanh_CV = rows.by_element(torch.tanh, logits_CV.div_(softcap))
    torch.mul(tanh_CV, softcap, out=logits_CV)
    return tanh_CV


def _allocate(
    logits_CV: Tensor,
    targets_C: Tensor,
    factor: float,
    gradient: bool,
    weights_C: Tensor | None = None,
) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=logits_CV.device)


def _run(
    logits_CV: Tensor,
    targets_C: Tensor,
    factor: float,
    gradient: bool,
    weights_C: Tensor | None = None,
) -> Tensor:
    count, size = logits_CV.shape
    targets_C = targets_C.contiguous()
    weights_C = None if weights_C is None else weights_C.contiguous()
    total = native.loaded().outsize_cross_entropy(
        *(native.CODES[logits_CV.dtype], logits_CV.data_ptr(), targets_C.data_ptr(), IGNORE),
        *(factor, gradient, count, size, native.threads()),
        None if weights_C is None else weights_C.data_ptr(),
    )
    if total < 0:
        check(targets_C, size)
    return _allocate(logits_CV, targets_C, factor, gradient, weights_C).fill_(total * factor)


def _run_there(
    logits_CV: Tensor,
    targets_C: Tensor,
    factor: float,
    gradient: bool,
    weights_C: Tensor | None = None,
) -> Tensor:
    """The host does not wait for the targets: one that is no token makes the sum NaN."""
    total = _allocate(logits_CV, targets_C, factor, gradient, weights_C)
    targets_C = targets_C.contiguous()
    weights_C = None if weights_C is None else weights_C.contiguous()
    native.kernels().cross_entropy(logits_CV, targets_C, factor, gradient, weights_C, total)
    return total


_OPERATORS = (
    native.define(
        "cross_entropy(Tensor(a!) logits, Tensor targets, float factor, bool gradient,"
        " Tensor? weights=None) -> Tensor",
        _run,
        _allocate,
        _run_there,
    ),
)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weights: tuple[Tensor, Tensor | None],  # autograd does not look for leaves in it
        targets: Targets,
        head: Head,
        gradient: bool,
    ) -> Tensor:
        weight_VD, bias_V = weights
        dtype = wide(h_TD.dtype)
        fused = head.bare(gradient) and native.served(h_TD, weight_VD, by="cross_entropy")
        loss = torch.zeros((), dtype=dtype, device=h_TD.device)
        gh_TD = torch.empty_like(h_TD) if gradient else None
        size = min(head.chunk, h_TD.shape[0])
        held = h_TD.dtype if fused else dtype  # the fused pass reads and writes half precision
        buffer_CV = torch.empty(size, weight_VD.shape[0], dtype=held, device=h_TD.device)
        for start in range(0, h_TD.shape[0], size):
            h_CD, here = h_TD[start : start + size], targets.at(slice(start, start + size))
            logits_CV = buffer_CV[: h_CD.shape[0]]
            logits(h_CD, weight_VD, bias_V, logits_CV)
            tanh_CV = soften(logits_CV, head.scale, head.softcap)
            entropy = head.fused if fused else head.entropy
            loss += entropy(logits_CV, here, gradient)
            if gh_TD is None:
                continue
            if tanh_CV is not None:
                logits_CV.mul_(tanh_CV.square_().neg_().add_(1))
            if head.scale != 1.0:
                logits_CV.mul_(head.scale)
            g_CV = logits_CV.to(h_TD.dtype)
            product.put_product(g_CV, weight_VD, gh_TD[start : start + size])
            head.accumulate(weight_VD, bias_V, g_CV, h_CD)
        ctx.gh_TD = gh_TD
        return loss

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        # The gradient was made for gy == 1: the one scale of the step is already in it.
        gh_TD, ctx.gh_TD = ctx.gh_TD, None
        return gh_TD, None, None, None, None


@dataclass(frozen=True)
class Head:
    """What the loss needs to know of the head beside its weight.

    factor: what every token's loss is multiplied by, 1 / (valid targets of the whole step): the one
    place where the loss is divided. chunk: tokens of a chunk. sink: receives the gradients. scale,
    softcap: of the logits. options: of the loss where gradients are made; a pass without gradients
    gives the plain cross-entropy. vocabulary: where the weight holds some of its rows only; h's
    gradient is then a summand, the sum over the workers is whole. loss: what is made of the
    cross-entropy where gradients are made, None for itself.
    """

    factor: float
    chunk: int
    sink: GradSink | None
    scale: float = 1.0
    softcap: float | None = None
    options: LossOptions = PLAIN
    vocabulary: Vocabulary | None = None
    loss: Loss | None = None

    def bare(self, gradient: bool) -> bool:
        """Whether the fused pass knows all of it."""
        added = gradient and (self.options != PLAIN or self.loss is not None)
        return not added and self.vocabulary is None and self.scale == 1.0 and self.softcap is None

    def fused(self, logits_CV: Tensor, targets: Targets, gradient: bool) -> Tensor:
        """The losses of a chunk, times factor; with `gradient`, logits become their gradient."""
        made = _run if native.bare(logits_CV) else torch.ops.outsize.cross_entropy.default
        loss: Tensor = made(logits_CV, targets.ids_T, self.factor, gradient, targets.weights_T)
        return loss

    def entropy(self, logits_CV: Tensor, targets: Targets, gradient: bool) -> Tensor:
        """The same by the pass that knows all of it."""
        options, loss = (self.options, self.loss) if gradient else (PLAIN, None)
        return plain(logits_CV, targets, self.factor, gradient, options, self.vocabulary, loss)

    def accumulate(self, weight: Tensor, bias: Tensor | None, g_CV: Tensor, h_CD: Tensor) -> None:
        """Hand the gradients of one chunk to the sink; they run at once: the buffer is reused."""
        assert self.sink is not None
        if weight.requires_grad:
            self.sink(weight, lambda grad: add_product(grad, g_CV.t(), h_CD))
        if bias is not None and bias.requires_grad:

            def compute(grad: Tensor) -> None:
                grad.add_(g_CV.sum(0))

            self.sink(bias, compute)


def chunked_loss(
    h_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets, head: Head
) -> Tensor:
    """Sum over valid targets of the loss times head.factor: a scalar, at least fp32.

    h_TD: hidden after the final norm. Where gradients are on, they are made here: weight and bias
    go to head.sink, and the backward pass only hands h's on (so the result must be differentiated
    with gradient 1).
    """
    if head.vocabulary is not None:
        check(targets.ids_T, head.vocabulary.size)
    gradient = torch.is_grad_enabled() and head.sink is not None
    if gradient and not h_TD.requires_grad:
        h_TD = h_TD.detach().requires_grad_()
    loss: Tensor = enter(_ChunkedLoss, h_TD, (weight_VD, bias_V), targets, head, gradient)
    return loss
