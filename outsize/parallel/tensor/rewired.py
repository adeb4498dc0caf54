"""Ladder and Kraken models on the tensor axis: sums that run beside the next branch.

A block of these launches a sum and takes it later (outsize/models/ladder.py, kraken.py). Without an
`Beside` it is there at once; with one, a courier takes it while the block goes on.

Ladder: what a branch gives is summed as in a plain model, one branch later. Kraken: the stream has
whole values and partial gradients from the embedding to the head, for each way sees it in its own
way; the one sum of a layer is a sum in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.models.kraken import KrakenAttention, KrakenBlock, KrakenMLP
from outsize.models.ladder import LadderBlock, Launch
from outsize.models.linear import Linear, without_bias
from outsize.parallel.courier import Flight
from outsize.parallel.sums import Crossing
from outsize.parallel.tensor.beside import Beside
from outsize.parallel.tensor.overlap_products import all_reduce

LADDER: Crossing = ("all_reduce", "none")
KRAKEN: Crossing = ("all_reduce", "all_reduce")


@dataclass(frozen=True)
class Rewired:
    """branches: of ladder blocks, by name; the first worker's summands have their biases. flying:
    they give summands; the block sums them."""

    branches: frozenset[str] = frozenset()
    flying: bool = False


def rewire(
    model: Decoder, axis: Collective, sequence_parallel: bool, beside: Beside | None
) -> Rewired:
    """Have the model's blocks sum over the axis as they are wired."""
    if model.config.ways > 1:
        _kraken(model, axis, beside)
    if model.config.ladder_from is None:
        return Rewired()
    names = set[str]()
    for i, block in enumerate(model.blocks):
        if isinstance(block, LadderBlock):
            _first_counts(block.attention, axis)
            _first_counts(block.mlp, axis)
            names |= {f"blocks.{i}.attention", f"blocks.{i}.mlp"}
    if beside is None or sequence_parallel:  # a stream cut by tokens has no place for summands
        return Rewired(frozenset(names))
    _launching(model, _flying(axis, beside, LADDER))
    return Rewired(frozenset(names), flying=True)


def check_ways(ways: int, size: int, sequence_parallel: bool) -> None:
    """OutsizeError where an axis of `size` workers cannot share a Kraken model."""
    if ways > 1 and ways % size:
        fits = max(n for n in range(1, size + 1) if ways % n == 0)
        raise OutsizeError(
            f"mesh: tensor is {size}, which does not divide the model's kraken_ways, {ways}; the"
            f" nearest that works is tensor={fits}"
        )
    if ways > 1 and sequence_parallel:
        raise OutsizeError(
            f"plan: sequence_parallel is set, but a model with kraken_ways {ways} sees its stream"
            " differently on every worker; set it to false"
        )


def _kraken(model: Decoder, axis: Collective, beside: Beside | None) -> None:
    for module in model.modules():
        if isinstance(module, KrakenBlock):
            module.ways = model.config.ways // axis.size
            module.first = axis.rank * module.ways
        elif isinstance(module, KrakenAttention | KrakenMLP):
            _first_counts(module, axis)
    _launching(model, _flying(axis, beside, KRAKEN))


def _launching(model: Decoder, launch: Launch) -> None:
    for block in model.blocks:
        if isinstance(block, LadderBlock | KrakenBlock):
            block.launch = launch
    assert model.epilogue.join is not None
    model.epilogue.join.launch = launch


def _first_counts(branch: nn.Module, axis: Collective) -> None:
    """The bias of a row weight is in the first worker's summand alone: where the sum is taken, the
    bias is not at hand."""
    for row in branch.children():
        if isinstance(row, Linear) and row.use == "row" and row.bias is not None and axis.rank:
            row.product = without_bias(row.product)


def _flying(axis: Collective, beside: Beside | None, crossing: Crossing) -> Launch:
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
