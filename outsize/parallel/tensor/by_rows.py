"""Blocks at the front whose weights are whole on the tensor axis, whose workers share rows there.

A degree of 1 for a run of blocks, where the others are cut. Each worker takes its rows of a
microbatch through the run, so that nothing is said inside of it, and has the gradients of these
rows. Where the run begins, what all workers have (B) becomes each one's rows (S), and where it ends
rows become whole again: the boxing of Yuan et al., "OneFlow", 2021. With sequence parallelism the
stream between branches is cut already, and where rows divide it is cut between rows: nothing is
converted.

A microbatch whose rows do not divide, and one that is generated, goes through the run whole on
every worker. Each then has the whole gradient of every weight there, and takes a share of it.

T tokens of a microbatch, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.collectives import Collective
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder, typed
from outsize.models.experts import Router
from outsize.models.seams import Context, all_of
from outsize.parallel.layouts import Exchange, Laid
from outsize.parallel.sums import cross, spans_of
from outsize.parallel.tensor.declared import BY_TOKENS, WHOLE, stream


def check_by_rows(model: Decoder, blocks: int) -> None:
    """OutsizeError where the first blocks of a decoder cannot share rows."""
    config, said = model.config, f"plan: {blocks} blocks share rows over the tensor axis"
    if blocks > len(model.blocks):
        raise OutsizeError(f"{said}, and the model has {len(model.blocks)}; expected no more")
    if config.rewired:
        raise OutsizeError(
            f"{said}, and the model is rewired as {config.rewired} says: its blocks take sums of"
            " others; expected 0"
        )
    if config.sided:
        raise OutsizeError(
            f"{said}, and the adapter's side network takes all that each block took; expected 0"
        )
    mixed = (i for i, b in enumerate(typed(model.blocks)) if _routed(b))
    if (first := next(mixed, blocks)) < blocks:
        raise OutsizeError(
            f"{said}, and block {first} has experts, whose balance is one of all rows; expected"
            f" {first} at most"
        )


def _routed(block: nn.Module) -> bool:
    return any(isinstance(module, Router) for module in block.modules())


def share_rows(model: Decoder, axis: Collective, blocks: int, sequence_parallel: bool) -> None:
    """Have the first blocks take this worker's rows of what is between blocks, and give them."""
    between = stream(sequence_parallel)
    for block in typed(model.blocks)[:blocks]:
        block.register_forward_pre_hook(partial(_inside, axis))
    first, last = model.blocks[0], model.blocks[blocks - 1]
    first.register_forward_pre_hook(partial(_enter, axis, between), prepend=True)
    last.register_forward_hook(partial(_leave, axis, between))


def _here(ctx: Context, axis: Collective) -> tuple[int, int] | None:
    """The tokens of the rows that this worker takes; None where all take all."""
    if not ctx.rows or ctx.rows % axis.size:
        return None
    return spans_of(ctx.bounds[-1], axis)[axis.rank]


def _inside(axis: Collective, _: nn.Module, args: tuple[Tensor, Context]) -> tuple[Any, ...]:
    """What a block is told of the tokens that are here; of rows only where they are shared."""
    x_TD, ctx = args
    here, own = _here(ctx, axis), replace(ctx, rows=0)
    if here is not None:
        own = replace(ctx.at(*here, ctx.attend, ctx.carry), rows=ctx.rows // axis.size)
    return x_TD, replace(own, between=all_of)


def _enter(
    axis: Collective, between: Laid, _: nn.Module, args: tuple[Tensor, Context]
) -> tuple[Any, ...]:
    """What is between blocks becomes this worker's rows."""
    x_TD, ctx = args
    cut = _here(ctx, axis) is not None
    crossing = Exchange(between, BY_TOKENS if cut else WHOLE).names
    x_TD = cross(x_TD, crossing, axis, 0, ctx.bounds[-1])
    return x_TD if cut else _times(x_TD, axis.size), ctx


def _leave(
    axis: Collective, between: Laid, _: nn.Module, args: tuple[Tensor, Context], y_TD: Tensor
) -> Tensor:
    """And its rows what is between blocks. The Context is what `_inside` has made."""
    ctx = args[1]
    total = ctx.bounds[-1] * (axis.size if ctx.rows else 1)
    y_TD = y_TD if ctx.rows else _times(y_TD, 1 / axis.size)
    return cross(y_TD, Exchange(BY_TOKENS if ctx.rows else WHOLE, between).names, axis, 0, total)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.factor, None


def _times(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient goes on so many times as large."""
    y: Tensor = _Times.apply(x, factor)  # type: ignore[no-untyped-call]
    return y
