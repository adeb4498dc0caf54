"""Tensor parallelism: a decoder becomes one worker's part of it.

Attention is cut between heads, feed-forward networks and experts between their inner features, the
token embedding and the head between tokens of the vocabulary (Shoeybi et al., "Megatron-LM", 2019).
With sequence parallelism the residual stream between them is cut by tokens (Korthikanti et al.,
2022). How every parameter and every boundary lies is data, in outsize/parallel/tensor/declared.py;
the model's code is the same with one worker and with many.

Exact: what is summed in another order differs by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.collectives import Collective
from outsize.models.adapter import Squares
from outsize.models.coding import CODES
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.models.experts import Router
from outsize.models.linear import Linear
from outsize.models.norm import Norm
from outsize.models.seams import Context
from outsize.models.wiring import AnyBlock
from outsize.parallel.sums import cross, spans_of
from outsize.parallel.tensor.beside import Beside
from outsize.parallel.tensor.by_rows import check_by_rows, share_rows
from outsize.parallel.tensor.declared import Boundary, boundaries, is_of_first
from outsize.parallel.tensor.rewired import Rewired, check_wiring, over_axis
from outsize.parallel.tensor.units import check, counts, cuts_of
from outsize.parallel.tensor.vocabulary import lookup, vocabulary
from outsize.parallel.tensor.wide_norm import wide_norm

_EDGES = ("input", "output")


def split(
    model: Decoder,
    axis: Collective,
    sequence_parallel: bool = False,
    beside: Beside | None = None,
    by_rows: int = 0,
) -> dict[str, Cut]:
    """Leave of a decoder this worker's part; gives how each parameter was cut, by name.

    sequence_parallel: the residual stream is cut by tokens. beside: takes sums while the worker
    computes. by_rows: blocks at the front that stay whole, and share rows.

    Shells and meta parameters stay such, values are copied; tied parameters stay one. The model
    then takes the same input on every worker and gives the same logits; its parameters' gradients
    are what the cuts say. Raises OutsizeError for sizes that the axis cannot divide.
    """
    check(model.config, axis.size)
    check_wiring(model.config, axis.size, sequence_parallel and axis.size > 1)
    cuts = cuts_of(model, axis.size, axis.rank, sequence_parallel, by_rows)
    if axis.size == 1:
        return cuts
    if by_rows:
        check_by_rows(model, by_rows)
        share_rows(model, axis, by_rows, sequence_parallel)
    keep(model, cuts)
    tokens = model.prologue.tokens
    model.epilogue.vocabulary = vocabulary(axis, model.config.vocab)
    tokens.lookup = lookup(model.epilogue.vocabulary.span)
    if sequence_parallel:
        model.between = lambda tokens: spans_of(tokens, axis)[axis.rank]
    _widen(model, axis, cuts, by_rows)
    modules = {n: one for n, one in model.named_modules() if not is_of_first(n, by_rows)}
    crossed, wired, wiring = boundaries(sequence_parallel), Rewired(), over_axis(model.config)
    if wiring is not None:
        crossed = wiring.boundaries(sequence_parallel)
        wired = wiring.rewire(model, axis, sequence_parallel, beside)
    taken = set[str]()
    if beside is not None:
        taken = _taken_over(modules, crossed, axis, beside, wired.branches)
    for boundary in crossed:
        for name in _matching(modules, boundary):
            if boundary.edge == "input":
                _ask(modules.get(name.rpartition(".")[0]), modules[name], boundary, axis)
            if name in taken or (
                wired.flying and name in wired.branches and boundary.edge == "output"
            ):
                continue
            module = modules[name]
            if boundary.edge == "input":
                _enter(module, boundary, axis)
            else:
                behind = name not in wired.branches
                _leave(module, boundary, axis, model.config.vocab, behind)
    return cuts


def _matching(modules: Mapping[str, nn.Module], boundary: Boundary) -> list[str]:
    return [name for name in modules if fnmatchcase(name, boundary.module)]


def _taken_over(
    modules: Mapping[str, nn.Module],
    every: Sequence[Boundary],
    axis: Collective,
    beside: Beside,
    others: frozenset[str],
) -> set[str]:
    """Have the branches taken over that can be, others left out; gives their names."""
    done = set[str]()
    for entering in every:
        for leaving in every:
            if entering.module != leaving.module or (entering.edge, leaving.edge) != _EDGES:
                continue
            for name in _matching(modules, entering):
                if beside.fits(modules[name]) and name not in others:
                    beside.take_over(modules[name], entering.crossing, leaving.crossing, axis)
                    done.add(name)
    return done


def keep(model: Decoder, cuts: Mapping[str, Cut]) -> None:
    """Put this worker's part in the place of every parameter that is cut."""
    wholes = {id(p): (p, cuts[name]) for name, p in model.named_parameters() if name in cuts}
    parts = {key: _part(p, cut) for key, (p, cut) in wholes.items() if cut.dim is not None}
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in parts:
                module.register_parameter(leaf, parts[id(parameter)])
        if isinstance(module, Linear) and module.coded is not None:
            module.coded = module.coded.part(cuts[f"{name}.{CODES}"])


def _part(whole: nn.Parameter, cut: Cut) -> nn.Parameter:
    value = cut.of(whole.detach())
    if whole.is_meta:
        value = torch.empty_like(value)
    elif any(whole.stride()):  # a shell has one element of memory, whatever its shape
        value = value.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(value, requires_grad=whole.requires_grad)


def _widen(model: Decoder, axis: Collective, cuts: Mapping[str, Cut], by_rows: int) -> None:
    """Norms that are cut, over all heads at once, take their statistic over the axis, and those of
    weights' rows theirs; so do rows that are rounded with one scale each, where they are cut. What
    all compute alike of routers, each has a share of."""
    having = counts(model.config)
    for name, module in model.named_modules():
        if is_of_first(name, by_rows):
            continue
        if isinstance(module, Squares) and module.cut:
            module.total = axis.all_reduce
        coded = module.coded if isinstance(module, Linear) else None
        by_row = coded is not None and coded.eights and coded.format.shared(1, 1)
        if by_row and cuts[f"{name}.{CODES}"].dim == 1:
            module.agree = partial(axis.all_reduce, operation="max")
        if isinstance(module, Router):
            module.share = 1 / axis.size
        if isinstance(module, Norm) and module.wide and module.lies.unit is not None:
            copies = max(1, axis.size // having[module.lies.unit])
            module.run = partial(wide_norm, axis=axis, copies=copies)


# Hooks of modules, so that they lie outside whatever runs the module in tiles or again.


def _enter(module: nn.Module, boundary: Boundary, axis: Collective) -> None:
    """Make a module's input cross a boundary."""

    def over(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = cross(args[0], boundary.crossing, axis, 0, _tokens(*args))
        return (x, *args[1:])

    if boundary.crossing != ("none", "none"):
        module.register_forward_pre_hook(over)


def _ask(block: nn.Module | None, mixer: Any, boundary: Boundary, axis: Collective) -> None:
    """Make the input of a block's mixer cross a boundary where it is asked for its states alone."""
    if isinstance(block, AnyBlock) and block.mixer is mixer:
        block.entering = lambda x, ctx: cross(x, boundary.crossing, axis, 0, ctx.bounds[-1])


def _leave(
    module: nn.Module, boundary: Boundary, axis: Collective, vocab: int, biases: bool = True
) -> None:
    """Make a module's output cross a boundary; the bias of its row weight is added behind."""
    if boundary.crossing == ("none", "none"):
        return
    behind = [_without_bias(row) for row in module.children() if biases and _is_row(row)]

    def over(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        total = vocab if boundary.dim else _tokens(y, *args[1:])
        y = cross(y, boundary.crossing, axis, boundary.dim, total)
        for add in behind:
            y = add(y)
        return y

    module.register_forward_hook(over)


def _tokens(x: Tensor, ctx: Context | None = None) -> int:
    """Tokens of the whole microbatch: a Context knows, where x may be a part of them."""
    return x.shape[0] if ctx is None else ctx.bounds[-1]


def _is_row(module: nn.Module) -> bool:
    return isinstance(module, Linear) and module.use == "row" and module.bias is not None


def _without_bias(row: nn.Module) -> Callable[[Tensor], Tensor]:
    """Leave the bias out of a row weight's product; gives what adds it to the sum."""
    assert isinstance(row, Linear)
    row.adds_bias = False

    def add(y: Tensor) -> Tensor:
        assert row.bias is not None
        return y + row.bias

    return add
