"""Conversions of a tensor from one layout to another on a mesh axis, forward and back.

OneFlow calls them boxing (Yuan et al., 2021). Gradients always lie as the dual of their values,
whole for whole, so what a conversion from s to t does backward is a conversion from t's dual to
s's. A whole tensor with which each worker computes its own part is "fanned out": its gradient is
summed.

Everything here is called by all workers of the axis in the same order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Collective
from outsize.parallel import sums
from outsize.parallel.layouts import (
    PARTIAL,
    Layout,
    Partial,
    Replicated,
    Sharded,
    bytes_received,
    dual,
    operation,
)
from outsize.parallel.shards import even


def moved(x: Tensor, source: Layout, target: Layout, total: int, axis: Collective) -> Tensor:
    """x, which lies as `source`, as it lies as `target`. total: rows of the whole tensor's dim that
    is sharded in the source. The memory of x may be used."""
    name = operation(source, target)
    if name == "none":
        return x
    match source, target:
        case _, Replicated() if name == "all_reduce":
            return sums.all_reduce(x, axis, 0, 0)
        case Sharded(dim), Replicated():
            return sums.all_gather(x, axis, dim, total)
        case Partial(), Sharded(dim):
            return sums.reduce_scatter(x, axis, dim, 0)
        case Replicated(), Sharded(dim):
            return sums.take(x, axis, dim, 0)
        case Replicated(), Partial():
            return x if axis.rank == 0 else torch.zeros_like(x)
        case Sharded(dim), Partial():
            return _place(x, dim, total, axis)
        case Sharded(old), Sharded(new):
            return _all_to_all(x, old, new, total, axis)
    raise AssertionError(f"no way from {source} to {target}")


def _place(x: Tensor, dim: int, total: int, axis: Collective) -> Tensor:
    """The own part among zeros."""
    first, last = sums.spans_of(total, axis)[axis.rank]
    out = x.new_zeros([total if d == dim else s for d, s in enumerate(x.shape)])
    out.narrow(dim, first, last - first).copy_(x)
    return out


def _all_to_all(x: Tensor, old: int, new: int, total: int, axis: Collective) -> Tensor:
    """Parts of dim `old`, of which the whole has `total` rows, become parts of dim `new`."""
    cuts = list(pairwise(even(0, x.shape[new], axis.size)))
    given = [x.narrow(new, a, b - a).contiguous() for a, b in cuts]
    mine = given[axis.rank].shape[new]
    out = []
    for first, last in pairwise(even(0, total, axis.size)):
        shape = list(x.shape)
        shape[old], shape[new] = last - first, mine
        out.append(x.new_empty(shape))
    axis.all_to_all(given, out)
    return torch.cat(out, old)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Layout, target: Layout, shape: Any, way: Any
    ) -> Tensor:
        axis, fanned = way
        ctx.facts = source, target, shape, axis, fanned
        y = moved(x.detach(), source, target, _total(shape, source), axis)
        return y.clone() if y.data_ptr() == x.data_ptr() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        source, target, shape, axis, fanned = ctx.facts
        arrives = PARTIAL if fanned else dual(target)
        total = _total(shape, arrives)
        return moved(g.clone(), arrives, dual(source), total, axis), None, None, None, None


def _total(shape: tuple[int, ...], layout: Layout) -> int:
    return shape[layout.dim] if isinstance(layout, Sharded) else 0


def convert(
    x: Tensor,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    axis: Collective,
    fanned: bool = False,
) -> Tensor:
    """x in another layout; its gradient goes the other way. shape: of the whole tensor. fanned:
    every worker computes something else with the (whole) result, whose gradient is a summand."""
    if source == target and not fanned:
        return x
    if not x.is_floating_point():
        return moved(x, source, target, _total(shape, source), axis)
    y: Tensor = _Convert.apply(x, source, target, shape, (axis, fanned))  # type: ignore[no-untyped-call]
    return y


def cost(
    source: Layout, target: Layout, numel: int, itemsize: int, n: int, learns: bool, fanned: bool
) -> float:
    """Bytes that a worker has from others by a conversion: forward, and backward where a gradient
    comes back."""
    forward = bytes_received(source, target, numel, itemsize, n)
    if not learns:
        return forward
    arrives = PARTIAL if fanned else dual(target)
    return forward + bytes_received(arrives, dual(source), numel, itemsize, n)
