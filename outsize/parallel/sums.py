"""Tensors that change their layout on a mesh axis, in both directions of differentiation.

What is summed going forward is copied going back, and the other way round: the f and g of Shoeybi
et al., "Megatron-LM", 2019; gathered and scattered by tokens: Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022. Which operation turns one layout into
another is said in outsize/parallel/layouts.py, where that happens in
outsize/parallel/tensor/declared.py. Everything here is called by all workers of the axis, from the
thread that computes, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective, Span
from outsize.parallel.shards import even

Crossing = tuple[str, str]  # names of operations: forward, backward


def spans_of(total: int, axis: Collective, unit: int = 1) -> tuple[Span, ...]:
    """What each worker has of `total` rows, in elements where a row has `unit`."""
    offsets = even(0, total, axis.size)
    return tuple((a * unit, b * unit) for a, b in pairwise(offsets))


def all_reduce(x: Tensor, axis: Collective, dim: int, total: int) -> Tensor:
    """The sum over the axis, in the memory of x where that is contiguous."""
    return axis.all_reduce(x.detach().contiguous())


def all_gather(x: Tensor, axis: Collective, dim: int, total: int) -> Tensor:
    """The whole, `total` along dim, of everybody's part."""
    mine = x.detach().movedim(dim, 0).contiguous()
    unit = mine[:1].numel() if mine.shape[0] else _product(mine.shape[1:])
    spans = spans_of(total, axis, unit)
    first, last = spans[axis.rank]
    assert mine.numel() == last - first, f"{mine.shape[0]} rows here of {total} on the axis"
    out = mine.new_empty((total, *mine.shape[1:]))
    axis.all_gather(mine.view(-1), spans, out.view(-1))
    return out.movedim(0, dim)


def reduce_scatter(x: Tensor, axis: Collective, dim: int, total: int) -> Tensor:
    """The own part along dim of the sum over the axis. The rest of x may be overwritten."""
    flat = x.detach().movedim(dim, 0).contiguous()
    first, last = spans_of(flat.shape[0], axis)[axis.rank]
    out = flat.new_empty((last - first, *flat.shape[1:]))
    spans = spans_of(flat.shape[0], axis, _product(flat.shape[1:]))
    axis.reduce_scatter(flat.view(-1), spans, out.view(-1))
    return out.movedim(0, dim)


def take(x: Tensor, axis: Collective, dim: int, total: int) -> Tensor:
    """The own part along dim, in memory of its own."""
    first, last = spans_of(x.shape[dim], axis)[axis.rank]
    return x.detach().narrow(dim, first, last - first).clone()


def _product(shape: torch.Size) -> int:
    return int(torch.Size(shape).numel())


_OPERATIONS: Mapping[str, Callable[[Tensor, Collective, int, int], Tensor]] = {
    "none": lambda x, axis, dim, total: x.view_as(x),
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "take": take,
}


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, crossing: Crossing, axis: Collective, dim: int, total: int
    ) -> Tensor:
        ctx.way = _OPERATIONS[crossing[1]], axis, dim, total
        return _OPERATIONS[crossing[0]](x, axis, dim, total)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        operation, *way = ctx.way
        return operation(g, *way), None, None, None, None


def cross(x: Tensor, crossing: Crossing, axis: Collective, dim: int = 0, total: int = 0) -> Tensor:
    """x after the forward operation of a crossing; its gradient goes through the backward one.

    dim: that the part of a worker is of; total: of the whole along it. The memory of x, and of the
    gradient that comes back, is used: nobody else may need them.
    """
    if axis.size == 1 or crossing == ("none", "none"):
        return x
    y: Tensor = _Cross.apply(x, crossing, axis, dim, total)  # type: ignore[no-untyped-call]
    return y
