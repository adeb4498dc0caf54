"""Products in chunks of tokens, the sum of each under way while the next one is multiplied.

How they lie in a branch is outsize/parallel/tensor/overlap.py. T tokens, of which this worker has t
between branches, I in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outsize.collectives import Collective, Span
from outsize.collectives.courier import Flight
from outsize.kernels import product
from outsize.kernels.linear import GradSink, add_product
from outsize.models.linear import Linear
from outsize.parallel.shards import even
from outsize.parallel.sums import spans_of

if TYPE_CHECKING:
    from outsize.parallel.tensor.overlap import Overlap

Rows = tuple[Span, ...]  # tokens [first, last) of a chunk, one span a worker where they are cut


Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Backward = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


class _Product(torch.autograd.Function):
    """A product whose forward is given; backward(gy, weight, wanted) -> whole gy, gradient of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: GradSink | None,
        forward: Forward,
        backward: Backward,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.bias, ctx.sink, ctx.back = weight, bias, sink, backward
        return forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias, sink = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.sink
        gy, gx = ctx.back(gy, weight, ctx.needs_input_grad[0])
        biased = bias is not None and bias.requires_grad
        if sink is None:
            gw = None if x is None else gy.t() @ x
            return gx, gw, gy.sum(0) if biased else None, None, None, None
        if x is not None:
            sink(weight, lambda grad: add_product(grad, gy.t(), x))
        if biased:
            sink(bias, lambda grad: grad.add_(gy.sum(0)))
        return gx, None, None, None, None, None


def multiply(
    x: Tensor,
    one: Linear,
    bias: Tensor | None,
    sink: GradSink | None,
    forward: Forward,
    backward: Backward,
) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(x, one.weight, bias)
    if sink is not None and not x.requires_grad:  # the Function must be entered all the same
        x = x.detach().requires_grad_()
    y: Tensor = _Product.apply(x, one.weight, bias, sink, forward, backward)  # type: ignore[no-untyped-call]
    return y


def summed_rows(
    way: Overlap, chunks: list[Rows], x_TI: Tensor, weight_OI: Tensor, _: Tensor | None
) -> Tensor:
    """The product of a row weight, summed over the axis."""
    y_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
    flights = []
    for ((first, last),) in chunks:
        product.put_product(x_TI[first:last], weight_OI.t(), y_TO[first:last])
        flights.append(way.send(partial(all_reduce, way.axis, y_TO[first:last]), x_TI.device))
    for flight in flights:
        flight.wait()
    return y_TO


def scattered_rows(
    way: Overlap, chunks: list[Rows], x_TI: Tensor, weight_OI: Tensor, _: Tensor | None
) -> Tensor:
    """The own tokens of the same; of every worker's tokens each chunk has some."""
    axis, width = way.axis, weight_OI.shape[0]
    begin, end = spans_of(x_TI.shape[0], axis)[axis.rank]
    y_tO, flights = x_TI.new_empty((end - begin, width)), []
    for rows in chunks:
        part = x_TI.new_empty((sum(last - first for first, last in rows), width))
        spans, at = [], 0
        for first, last in rows:
            stop = at + last - first
            product.put_product(x_TI[first:last], weight_OI.t(), part[at:stop])
            spans.append((at * width, stop * width))
            at = stop
        first, last = rows[axis.rank]
        out = y_tO[first - begin : last - begin].view(-1)
        work = partial(axis.reduce_scatter, part.view(-1), tuple(spans), out)
        flights.append(way.send(work, x_TI.device))
    for flight in flights:
        flight.wait()
    return y_tO


def gathered_back(
    way: Overlap, total: int, gy_tO: Tensor, weight_OI: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of everybody's tokens, multiplied as it comes."""
    gy_TO = gy_tO.new_empty((total, gy_tO.shape[1]))
    gx_TI = gy_tO.new_empty((total, weight_OI.shape[1])) if wanted else None
    for rows, flight in gather(way, gy_tO.contiguous(), gy_TO):
        flight.wait()
        if gx_TI is not None:
            for first, last in rows:
                product.put_product(gy_TO[first:last], weight_OI, gx_TI[first:last])
    return gy_TO, gx_TI


def plain_back(gy: Tensor, weight_OI: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    return gy, product.product(gy, weight_OI) if wanted else None


def all_reduce(axis: Collective, x: Tensor) -> None:
    axis.all_reduce(x)


def gather(way: Overlap, x_tD: Tensor, x_TD: Tensor) -> list[tuple[Rows, Flight]]:
    axis, unit = way.axis, x_TD[:1].numel()
    begin, _ = spans_of(x_TD.shape[0], axis)[axis.rank]
    flights = []
    for rows in chunks_of(x_TD.shape[0], way.chunks, axis.size):
        first, last = rows[axis.rank]
        mine = x_tD[first - begin : last - begin].view(-1)
        spans = tuple((a * unit, b * unit) for a, b in rows)
        work = partial(axis.all_gather, mine, spans, x_TD.view(-1))
        flights.append((rows, way.send(work, x_TD.device)))
    return flights


def chunks_of(tokens: int, chunks: int, workers: int) -> list[Rows]:
    """Chunks of the tokens, each with as many of every worker's as of any other's; fewer where a
    worker has fewer tokens than there are chunks."""
    spans = list(pairwise(even(0, tokens, workers)))
    count = max(1, min(chunks, *(last - first for first, last in spans)))
    cuts = [even(first, last, count) for first, last in spans]
    return [tuple((cut[i], cut[i + 1]) for cut in cuts) for i in range(count)]
