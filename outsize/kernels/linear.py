"""Matrix multiplication whose weight gradient can be handed to a sink.

Autograd gives a weight's gradient as a fresh tensor and then adds it to `.grad`: one more buffer of
the weight's size and one more pass over it. A sink receives the computation instead, and may run
it into a flat gradient buffer at once (BACKWARD) or later (BACKWARD_WEIGHT of zero-bubble
schedules; Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

T tokens, I in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator
from outsize.kernels import product
from outsize.torch_private import FakeTensor, enter


class GradSink(Protocol):
    """Receives weight gradients as computations."""

    def __call__(self, weight: Tensor, compute: Callable[[Tensor], None]) -> None:
        """Take the gradient of `weight`: `compute(grad)` adds it to `grad` (shape of `weight`)."""


def add_product(grad: Tensor, a: Tensor, b: Tensor) -> None:
    """grad += a @ b, accumulated in the dtype of `grad`."""
    wide = grad.dtype == torch.float32 and product.widens(a, b, b.shape[-1])
    if grad.dtype == a.dtype or wide:
        product.add_product(grad, a, b)
    elif grad.dtype == torch.float32 and _wide(a):
        accelerator.add_wide(grad, a, b)
    else:
        from outsize.kernels.accumulate import accumulate  # of training

        accumulate(grad, a @ b)


def _wide(a: Tensor) -> bool:
    """A plan is made as if not: PyTorch has no shape of it, and what it saves is room."""
    return type(a) is not FakeTensor and accelerator.adds_wide(a.device, a.dtype)


Held = tuple[Tensor, Tensor | None, GradSink]  # weight, bias and who takes their gradients


class _SinkLinear(torch.autograd.Function):
    # Weight and bias come in a tuple, which autograd does not look into: they would be leaves of
    # the graph that never get anything from it, and the sink knows them by identity.
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held, anchor: Tensor | None) -> Tensor:
        weight, bias, _ = ctx.held = held
        # A weight that is frozen needs no x: nothing of it is kept.
        ctx.save_for_backward(x if weight.requires_grad else None)
        return product.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None]:
        (x,), (weight, bias, sink) = ctx.saved_tensors, ctx.held
        gx = product.product(gy, weight) if ctx.needs_input_grad[0] else None
        gy_TO = _rows(gy)
        if x is not None:
            x_TI = _rows(x)
            sink(weight, lambda grad: add_product(grad, gy_TO.t(), x_TI))
        if bias is not None and bias.requires_grad:
            sink(bias, lambda grad: grad.add_(gy_TO.sum(0)))
        return gx, None, None


def _rows(x: Tensor) -> Tensor:
    """x (..., D) with all before its last dim as one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sink: GradSink | None) -> Tensor:
    """x (..., I) times weight (O, I) plus bias (O): (..., O).

    With a sink, gradients of weight and bias go to it and autograd sees none of them.
    """
    if not torch.is_grad_enabled():  # as the pass that keeps gradients computes it, bit for bit
        return product.linear(x, weight, bias)
    if sink is None:
        return F.linear(x, weight, bias)
    anchor: Tensor | None = None
    if not x.requires_grad:
        if not weight.requires_grad and (bias is None or not bias.requires_grad):
            return product.linear(x, weight, bias)  # nothing before it learns, nor does it
        # The Function must be entered for its weight's sake; x has no gradient.
        anchor = torch.empty(0, device=x.device, requires_grad=True)
    y: Tensor = enter(_SinkLinear, x, (weight, bias, sink), anchor)
    return y


class _SinkEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, held: tuple[Tensor, GradSink]) -> Tensor:
        ctx.ids, ctx.held = ids, held
        return F.embedding(ids, held[0])

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[None, None, None]:
        ids_T, gy_TD, (weight, sink) = ctx.ids.reshape(-1), _rows(gy), ctx.held
        sink(weight, lambda grad: grad.index_add_(0, ids_T, gy_TD.to(grad.dtype)))
        return None, None, None


def embedding(ids: Tensor, weight: Tensor, sink: GradSink | None) -> Tensor:
    """Rows of weight (V, D) at ids (...): (..., D). With a sink, the gradient goes to it."""
    if sink is None or not torch.is_grad_enabled() or not weight.requires_grad:
        return F.embedding(ids, weight)
    anchor = torch.empty(0, device=weight.device, requires_grad=True)
    y: Tensor = enter(_SinkEmbedding, anchor, ids, (weight, sink))
    return y
