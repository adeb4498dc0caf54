"""Models whose branches are wired otherwise, on the tensor axis: sums beside the next branch.

A block of these launches a sum and takes it later (outsize/models/wiring.py). Without a `Beside` it
is there at once; with one, a courier takes it while the block goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from outsize.collectives import Collective
from outsize.collectives.courier import Flight
from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.declared import Unit
from outsize.models.decoder import Decoder
from outsize.models.linear import Linear
from outsize.models.wiring import Launch, Launching, Wiring
from outsize.parallel.sums import Crossing
from outsize.parallel.tensor.beside import Beside
from outsize.parallel.tensor.overlap_products import all_reduce

if TYPE_CHECKING:
    from outsize.parallel.tensor.declared import Boundary


@dataclass(frozen=True)
class Rewired:
    """branches: that are wired otherwise, by name; the first worker's summands have their biases.
    flying: they give summands; the block sums them."""

    branches: frozenset[str] = frozenset()
    flying: bool = False


@runtime_checkable
class OverAxis(Wiring, Protocol):
    """A wiring as a tensor axis needs it."""

    def check(self, size: int, sequence_parallel: bool) -> None:
        """OutsizeError where an axis of `size` workers cannot share the model."""

    def units(self) -> Mapping[Unit, int]:
        """How many it has of what is never cut apart, and a plain model has not."""

    def inside(self) -> tuple[str, ...]:
        """Names of what has partial gradients, as patterns."""

    def boundaries(self, sequence_parallel: bool) -> tuple[Boundary, ...]:
        """Where layouts change."""

    def rewire(
        self, model: Decoder, axis: Collective, sequence_parallel: bool, beside: Beside | None
    ) -> Rewired:
        """Have the model's blocks sum over the axis as they are wired."""


def over_axis(config: DecoderConfig) -> OverAxis | None:
    """A model's wiring, None where it is plain."""
    assert config.wiring is None or isinstance(config.wiring, OverAxis)
    return config.wiring


def check_wiring(config: DecoderConfig, size: int, sequence_parallel: bool) -> None:
    """OutsizeError where an axis of `size` workers cannot share a model that is wired otherwise, or
    the tokens of one whose adapter sees what each block took."""
    if config.sided and sequence_parallel:
        raise OutsizeError(
            "plan.sequence_parallel is set, and the adapter's side network attends to all tokens of"
            " what each block took; set it to false"
        )
    if (wiring := over_axis(config)) is not None:
        wiring.check(size, sequence_parallel)


def launching(model: Decoder, launch: Launch) -> None:
    """Have the sums of a model's blocks launched like this."""
    for block in model.blocks:
        if isinstance(block, Launching):
            block.launch = launch
    assert model.epilogue.join is not None
    model.epilogue.join.launch = launch


def first_counts(branch: nn.Module, axis: Collective) -> None:
    """The bias of a row weight is in the first worker's summand alone: where the sum is taken, the
    bias is not at hand."""
    for row in branch.children():
        if isinstance(row, Linear) and row.use == "row" and row.bias is not None and axis.rank:
            row.adds_bias = False


def flying(axis: Collective, beside: Beside | None, crossing: Crossing) -> Launch:
    """Sums over the axis that are taken while the block goes on; at once where `beside` is None."""

    def launch(x: Tensor) -> Callable[[], Tensor]:
        flights: list[Flight] = []
        y: Tensor = _Launch.apply(x, flights, axis, beside, crossing)  # type: ignore[no-untyped-call]
        return lambda: _Land.apply(y, flights)  # type: ignore[no-untyped-call]

    return launch


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        flights: list[Flight],
        axis: Collective,
        beside: Beside | None,
        crossing: Crossing,
    ) -> Tensor:
        ctx.way = axis, crossing[1]
        y = x.detach().clone(memory_format=torch.contiguous_format)
        if beside is None:
            return axis.all_reduce(y)
        flights.append(beside.send(partial(all_reduce, beside.axis, y), y.device))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        axis, back = ctx.way
        if back == "all_reduce":  # of a copy: the stream has the same gradient
            g = axis.all_reduce(g.detach().clone(memory_format=torch.contiguous_format))
        return g, None, None, None, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, flights: list[Flight]) -> Tensor:
        for flight in flights:
            flight.wait()
        flights.clear()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None
