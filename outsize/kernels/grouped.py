"""Products of rows with one of several weights each, where the device alone knows which rows are
whose.

Rows are sorted by weight. `ends` says on the device where those of each weight end, so that the
host does not wait for who chose, as a router does. Each product is one operator: on NVIDIA, AMD and
Intel devices a kernel of grouped_kernels.py, or PyTorch's own where that reads `ends` on the
device. Where the host computes it knows how many rows each weight has, and one product a weight is
faster.

N rows, E weights, I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize import accelerator
from outsize.kernels import native, product
from outsize.kernels.linear import GradSink, add_product

GRAIN = 16  # bytes: PyTorch's kernel takes rows that begin at multiples of it


def served(device: torch.device) -> bool:
    """Whether a device multiplies so, without the host."""
    return accelerator.queues(device) and accelerator.runs("outsize::grouped", device)


def ends_of(sizes_E: Tensor) -> Tensor:
    """Where the rows of each weight end, int32. sizes_E: how many there are of each."""
    return sizes_E.cumsum(0, dtype=torch.int32)


def grouped(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, sink: GradSink | None) -> Tensor:
    """Each row times its weight: (N, O). Rows behind the last end are nobody's: what they give is
    undefined. With a sink, the gradient of the weight goes to it and autograd sees none of it."""
    if not torch.is_grad_enabled():
        return _product(x_NI, weight_EOI, ends_E)
    if sink is not None and not x_NI.requires_grad:
        if not weight_EOI.requires_grad:
            return _product(x_NI, weight_EOI, ends_E)
        x_NI = x_NI.detach().requires_grad_()  # the Function must be entered for its weight's sake
    own = weight_EOI if sink is None else None  # else it would be a leaf that never gets anything
    y: Tensor = _Grouped.apply(x_NI, own, ends_E, (weight_EOI, sink))  # type: ignore[no-untyped-call]
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        own: Tensor | None,
        ends_E: Tensor,
        held: tuple[Tensor, GradSink | None],
    ) -> Tensor:
        ctx.held = held
        ctx.save_for_backward(x_NI if held[0].requires_grad else None, ends_E)
        return _product(x_NI, held[0], ends_E)

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x_NI, ends_E), (weight, sink) = ctx.saved_tensors, ctx.held
        g_NO = g_NO.contiguous()
        gx = _product(g_NO, weight.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
        if x_NI is None:
            return gx, None, None, None
        if sink is None:
            grad = torch.zeros_like(weight)
            _add(grad, g_NO, x_NI, ends_E)
            return gx, grad, None, None
        sink(weight, lambda grad: _add(grad, g_NO, x_NI, ends_E))
        return gx, None, None, None


def _product(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    y: Tensor = torch.ops.outsize.grouped.default(x_NI.contiguous(), weight_EOI, ends_E)
    return y


def _add(total_EOI: Tensor, g_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> None:
    """total += by weight, the sum over its rows of g times x; contiguous."""
    torch.ops.outsize.grouped_add.default(total_EOI, g_NO, x_NI.contiguous(), ends_E)


# -- on the host: the plain twin ------------------------------------------------------------------


def _rows(ends_E: Tensor) -> Iterator[slice]:
    first = 0
    for last in ends_E.tolist():
        yield slice(first, last)
        first = last


def _allocate(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty((x_NI.shape[0], weight_EOI.shape[1]))


@torch.no_grad()
def _run(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    y_NO = _allocate(x_NI, weight_EOI, ends_E)
    for rows, weight_OI in zip(_rows(ends_E), weight_EOI, strict=True):
        y_NO[rows] = product.linear(x_NI[rows], weight_OI, None)
    return y_NO


@torch.no_grad()
def _run_add(total_EOI: Tensor, g_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> None:
    for rows, total_OI in zip(_rows(ends_E), total_EOI, strict=True):
        add_product(total_OI, g_NO[rows].t(), x_NI[rows])


# -- on a device ----------------------------------------------------------------------------------


def by_pytorch(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The product by PyTorch's own kernel. Its sum over rows is not used: it comes in memory of its
    own, as much as all weights take."""
    return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=ends_E)


def _whole(*tensors: Tensor) -> bool:
    """Whether PyTorch's kernel takes these: each row, and the first, begins at a multiple of GRAIN
    bytes."""
    return all(
        x.data_ptr() % GRAIN == 0
        and all(step == 1 or step * x.element_size() % GRAIN == 0 for step in x.stride())
        for x in tensors
    )


def _on_device(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    out = weight_EOI.shape[1] * x_NI.element_size()
    if accelerator.groups(x_NI) and out % GRAIN == 0 and _whole(x_NI, weight_EOI):
        return by_pytorch(x_NI, weight_EOI, ends_E)
    y_NO = _allocate(x_NI, weight_EOI, ends_E)
    native.kernels("grouped").product(x_NI, weight_EOI, ends_E, y_NO)
    return y_NO


def _add_on_device(total_EOI: Tensor, g_NO: Tensor, x_NI: Tensor, ends_E: Tensor) -> None:
    native.kernels("grouped").add(total_EOI, g_NO, x_NI, ends_E)


def _defined() -> Iterator[torch.library.Library]:
    """The operators."""
    product_of = "grouped(Tensor x, Tensor weight, Tensor ends) -> Tensor"
    sum_of = "grouped_add(Tensor(a!) total, Tensor g, Tensor x, Tensor ends) -> ()"
    for schema, run, allocate, there in (
        (product_of, _run, _allocate, _on_device),
        (sum_of, _run_add, native.nothing, _add_on_device),
    ):
        yield native.define(schema, run, allocate, there)


_OPERATORS = tuple(_defined())
