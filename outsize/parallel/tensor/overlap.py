"""Products in chunks of tokens, each chunk's sum under way while the next one is multiplied.

What T3 (Pati et al., "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives", 2024) does in hardware and asynchronous tensor parallelism does in kernels, done with
a thread that communicates (outsize/collectives/courier.py), in both directions of differentiation:

- the product of a row weight, and the sum (or the scattered sum) of its output;
- with sequence parallelism the gather of a branch's input, and the products of its column weights;
  going back, the gather of the gradient and the row weight's products;
- going back, the sum of the input's gradient runs beside the products of the column weights'
  gradients, which nothing waits for.

Every element is summed over the workers as it is without chunks, in the same order.

T tokens, of which this worker has t between branches, I in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.collectives import Collective, World, along
from outsize.collectives.courier import Courier, Flight
from outsize.kernels import product
from outsize.kernels.linear import GradSink, linear
from outsize.models.linear import Linear, dense
from outsize.models.norm import Norm
from outsize.models.seams import Context
from outsize.parallel.sums import Crossing, cross, spans_of
from outsize.parallel.tensor.overlap_products import (
    Rows,
    all_reduce,
    chunks_of,
    gather,
    gathered_back,
    multiply,
    plain_back,
    scattered_rows,
    summed_rows,
)

__all__ = ["Arrivals", "Branch", "Overlap", "fits", "overlap_of"]


@dataclass(frozen=True)
class Overlap:
    """axis: a collective of the workers that nobody but the courier calls. chunks: of a product."""

    axis: Collective
    chunks: int
    courier: Courier = field(default_factory=Courier)

    def send(self, work: Callable[[], None], device: torch.device) -> Flight:
        """Have the courier do something on the axis."""
        return self.courier.send(work, device)

    def fits(self, branch: nn.Module) -> bool:
        return fits(branch)

    def take_over(
        self, branch: nn.Module, entering: Crossing, leaving: Crossing, axis: Collective
    ) -> None:
        Branch(branch, entering, leaving, axis, self)


def overlap_of(world: World, chunks: int) -> Overlap:
    """Of the tensor axis."""
    return Overlap(along(world, "tensor", "beside"), chunks)


def fits(module: nn.Module) -> bool:
    """Whether a branch's products are those of column weights on its input, then of its row weight
    alone: everything that it has is a Linear that is cut and has a weight, or a norm, and what is
    beside one reads no input of which tokens are on their way."""
    parts = list(module.children())
    linears = [part for part in parts if isinstance(part, Linear)]
    simple = all(isinstance(part, Linear | Norm) for part in parts)
    coded = any(one.coded is not None for one in linears)
    waits = all(one.beside is None or not one.beside.enters for one in linears)
    uses = sorted({one.use for one in linears})
    return simple and waits and not coded and uses == ["column", "row"]


class Branch:
    """Stands in for the boundaries of a branch that `fits`, from now on. entering, leaving: the
    crossings there; axis: for what is not overlapped."""

    def __init__(
        self,
        module: nn.Module,
        entering: Crossing,
        leaving: Crossing,
        axis: Collective,
        way: Overlap,
    ) -> None:
        self.entering, self.leaving, self.axis, self.way = entering, leaving, axis, way
        self._run: Arrivals | None = None
        linears = [child for child in module.children() if isinstance(child, Linear)]
        (self.row,) = (one for one in linears if one.use == "row")
        self.row.adds_bias = False
        for one in linears:
            one.product = self._row if one is self.row else self._column
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)
        module.register_forward_hook(self._forget, always_call=True)

    # -- hooks of the branch, outside whatever runs it in tiles or again --------------------------

    def _enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        ctx = rest[0] if rest else None
        total = ctx.bounds[-1] if isinstance(ctx, Context) else x.shape[0]
        run = self._run = Arrivals(self.way, self.entering, total)
        run.defers = x.requires_grad and run.grad
        run.x = _Enter.apply(x, run)  # type: ignore[no-untyped-call]
        return (run.x, *rest)

    def _leave(self, _: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        run = self._run
        assert run is not None
        if not run.summed:
            y = cross(y, self.leaving, self.axis, 0, run.total)
        return y if self.row.bias is None else y + self.row.bias

    def _forget(self, *_: Any) -> None:
        if self._run is not None:
            self._run.x = None  # its graph holds the run
        self._run = None

    # -- the weights' products --------------------------------------------------------------------

    def _column(self, one: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        run = self._run
        if run is None:  # computed again: nothing is on its way
            return dense(one, x, bias)
        sink = one.sink if one.sink is None or not run.defers else partial(run.defer, one.sink)
        if x is not run.x or not run.arriving:
            run.land()
            return linear(x, one.weight, bias, sink)
        return multiply(x, one, bias, sink, run.multiplied, plain_back)

    def _row(self, row: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        """Without its bias, which is added behind the sum."""
        run, size = self._run, self.way.axis.size
        scattered = self.leaving[0] == "reduce_scatter"
        chunks = chunks_of(x.shape[0], self.way.chunks, size if scattered else 1)
        if run is None or (scattered and not run.whole(x)):
            return dense(row, x, None)
        if row.beside is not None:  # what is beside it has to be in the sum
            return dense(row, x, None)
        if len(chunks) < 2 and not run.summed:  # a last tile of one token goes as others did
            return dense(row, x, None)
        run.summed = True
        if scattered:
            forward = partial(scattered_rows, self.way, chunks)
            back = partial(gathered_back, self.way, run.total)
            return multiply(x, row, None, row.sink, forward, back)
        return multiply(x, row, None, row.sink, partial(summed_rows, self.way, chunks), plain_back)


class Arrivals:
    """One call of a branch: what is on its way, and what waits for its turn."""

    def __init__(self, way: Overlap, crossing: Crossing, total: int) -> None:
        self.way, self.crossing, self.total = way, crossing, total
        self.x: Tensor | None = None
        self.summed = self.defers = False
        self.grad = torch.is_grad_enabled()  # another one inside: somebody runs it again
        self.arriving: list[tuple[Rows, Flight]] = []
        self._later: list[tuple[GradSink, Tensor, Callable[[Tensor], None]]] = []

    def whole(self, x: Tensor) -> bool:
        """Whether x has all tokens, and nobody will run the branch again."""
        return x.shape[0] == self.total and torch.is_grad_enabled() == self.grad

    def gather(self, x_tD: Tensor) -> Tensor:
        """x_TD, its chunks arriving one after another."""
        x_TD = x_tD.new_empty((self.total, *x_tD.shape[1:]))
        self.arriving = gather(self.way, x_tD.detach().contiguous(), x_TD)
        return x_TD

    def multiplied(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product, a chunk at a time as they come."""
        y_TO = x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))
        for rows, flight in self.arriving:
            flight.wait()
            for first, last in rows:
                y_TO[first:last] = product.linear(x_TI[first:last], weight_OI, bias_O)
        self.arriving = []
        return y_TO

    def land(self) -> None:
        """Wait for all that is on its way."""
        for _, flight in self.arriving:
            flight.wait()
        self.arriving = []

    def defer(self, sink: GradSink, weight: Tensor, compute: Callable[[Tensor], None]) -> None:
        """A weight's gradient, to be computed beside the sum of the input's."""
        self._later.append((sink, weight, compute))

    def back(self, g: Tensor) -> Tensor:
        """The input's gradient over the axis; meanwhile those of the weights."""
        axis, g = self.way.axis, g.detach().contiguous()
        if self.crossing[1] == "reduce_scatter":
            unit = g[:1].numel()
            spans = spans_of(g.shape[0], axis)
            first, last = spans[axis.rank]
            out, flat = g.new_empty((last - first, *g.shape[1:])), g.view(-1)
            wide = tuple((a * unit, b * unit) for a, b in spans)
            flight = self.way.send(lambda: axis.reduce_scatter(flat, wide, out.view(-1)), g.device)
        else:
            out = g
            flight = self.way.send(partial(all_reduce, axis, g), g.device)
        later, self._later = self._later, []
        for sink, weight, compute in later:
            sink(weight, compute)
        flight.wait()
        return out


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Arrivals) -> Tensor:
        ctx.run = run
        return run.gather(x) if run.crossing[0] == "all_gather" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.run.back(g), None
