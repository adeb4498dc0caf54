"""Tensor parallelism derived for any model of blocks, unmodified.

Redco (Tan et al., 2023) has two rules: the dim to cut alternates from one weight to the next, and
some names stand for columns and rows. Here the rules are what they are meant to be, and proved. A
linear layer may be cut along its output ("column") and another along its input ("row") when all
that lies between them works on each part by itself: activations, heads of attention. Which layers
feed which is read off a trace of one block on the meta device; whether a pair is sound is asked of
the checker, which follows values and gradients through every operator between. What it cannot prove
stays whole on every worker. Of a mask that has a part for each head, as T5's with its biases of
positions, attention takes the worker's heads; its gradient is gathered.

The block's own code then runs on parts. Whether it does so rightly, and which of its counts of
heads have to become smaller for it, is proved by tracing it again over the parts' shapes
(outsize/parallel/automatic/local.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from outsize.models.adopt import find_blocks
from outsize.parallel.automatic.capture import Arguments, first_calls
from outsize.parallel.automatic.local import Change, local_changes
from outsize.parallel.automatic.products import Product, products, segments, sources
from outsize.parallel.check.checker import Checked, Declaration, examined
from outsize.parallel.check.graph import Graph, Site
from outsize.parallel.check.trace import MASK, trace
from outsize.parallel.layouts import (
    FAN_OUT,
    PARTIAL,
    REPLICATED,
    SUM,
    Exchange,
    Laid,
    Layout,
    Sharded,
    sharded,
)

AXIS = "tensor"


@dataclass(frozen=True)
class Group:
    """Linear layers that go together: columns, and the row that takes what comes of them. whole:
    layers that stay whole but feed the same row; their gradients are partial. fans: inputs of the
    columns and whole ones, by the tensor that they take: each is fanned out once. masks: modules
    whose attention takes its part of a mask that has one for each head, with the dim."""

    columns: tuple[Product, ...]
    row: Product
    whole: tuple[Product, ...] = ()
    fans: tuple[tuple[str, ...], ...] = ()
    masks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Derived:
    """What can be spread of one kind of block on `size` workers. Paths and names are within the
    block. parameters: layouts of those that are not whole; reduced: those whose gradients are to be
    summed over the axis; changes: counts of heads and the like that become smaller; left: the rows
    that stay whole, with the reason."""

    size: int
    groups: tuple[Group, ...] = ()
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    reduced: frozenset[str] = frozenset()
    changes: tuple[Change, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


def derive(
    model: nn.Module,
    size: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    blocks: str | Sequence[str] | None = None,
) -> dict[str, Derived]:
    """What can be spread of each of a model's blocks, by path, on `size` workers.

    args, kwargs: a call of the model, as input ids of any rows and tokens. blocks: path patterns,
    of a model whose blocks are not found. The model is left as it is.
    """
    found = [(path, block, kind_of(block)) for path, block in find_blocks(model, blocks)]
    firsts: dict[object, nn.Module] = {}
    for _, block, kind in found:
        firsts.setdefault(kind, block)
    calls = first_calls(model, list(firsts.values()), args, kwargs)
    kinds = {
        kind: derive_block(block, call, size)
        for (kind, block), call in zip(firsts.items(), calls, strict=True)
    }
    return {path: kinds[kind] for path, _, kind in found}


def kind_of(block: nn.Module) -> object:
    """What blocks have in common that are spread alike."""
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    counts = tuple(
        (path, type(part), *((k, v) for k, v in vars(part).items() if _is_count(k, v)))
        for path, part in block.named_modules()
    )
    return shapes, counts


def _is_count(name: str, value: object) -> bool:
    return isinstance(value, int) and not name.startswith(("layer", "_"))


def derive_block(block: nn.Module, call: Arguments, size: int) -> Derived:
    """What can be spread of a block that is called like this (tensors on the meta device)."""
    weights = _stand_ins(block)
    graph = trace(block, *call, weights=weights)
    here = products(graph, block)
    derived = Derived(size)
    if size == 1:
        return derived
    taken: set[str] = set()
    for row in reversed(here):
        feeding, masks = sources(graph, here, row)
        if not feeding or row.module in taken or any(p.module in taken for p in feeding):
            continue
        seen = tuple((n.module, len(graph.values[n.outputs[0]].shape) - 3) for n in masks)
        new, reason = _grouped(block, call, graph, derived, row, feeding, seen)
        if new is None:
            derived = replace(derived, left={**derived.left, row.module: reason})
            continue
        derived = new
        taken |= {row.module, *(p.module for p in feeding)}
    left = {module: reason for module, reason in derived.left.items() if module not in taken}
    return replace(derived, left=left)


def _stand_ins(block: nn.Module) -> dict[str, Tensor]:
    named = [*block.named_parameters(), *block.named_buffers()]
    return {
        name: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)
        for name, t in named
    }


def _grouped(
    block: nn.Module,
    call: Arguments,
    graph: Graph,
    before: Derived,
    row: Product,
    feeding: Sequence[Product],
    masks: tuple[tuple[str, int], ...],
) -> tuple[Derived | None, str]:
    """With a row and its columns, if that is proved; or the reason why it is not."""
    reason = ""
    for columns in _choices(feeding):
        try:
            group, layouts = _laid(graph, row, columns, feeding, before.size)
        except _Uneven as uneven:
            reason = reason or str(uneven)
            continue
        tried = replace(
            before,
            groups=(*before.groups, replace(group, masks=masks)),
            parameters={**before.parameters, **layouts},
        )
        proved, why = _proved(graph, tried)
        if proved is None:
            reason = reason or why
            continue
        derived, checked = proved
        cut = [p for group in derived.groups for p in group.columns]
        changes = local_changes(block, call, graph, checked, derived.parameters, cut, before.size)
        if changes is not None:
            return replace(derived, changes=changes), ""
        reason = reason or "its own code does not run on parts of these shapes"
    return None, reason


def _choices(feeding: Sequence[Product]) -> Iterator[tuple[Product, ...]]:
    """Which of the feeding layers are cut: all; else the widest, as queries beside few keys."""
    yield tuple(feeding)
    widest = max(p.features for p in feeding)
    few = tuple(p for p in feeding if p.features == widest)
    if len(few) < len(feeding):
        yield few


class _Uneven(Exception):
    """A size that the workers do not divide."""


def _laid(
    graph: Graph,
    row: Product,
    columns: Sequence[Product],
    feeding: Sequence[Product],
    size: int,
) -> tuple[Group, dict[str, Layout]]:
    layouts: dict[str, Layout] = {}
    for column in columns:
        lengths = segments(graph, column)
        if any(length % size for length in lengths):
            raise _Uneven(f"{column.module} has {lengths} features, which {size} do not divide")
        layouts[column.weight] = sharded(column.outer, lengths)
        if column.bias is not None:
            layouts[column.bias] = sharded(0, lengths)
    if row.inputs % size:
        raise _Uneven(f"{row.module} takes {row.inputs} features, which {size} do not divide")
    layouts[row.weight] = Sharded(1 - row.outer)
    whole = tuple(p for p in feeding if p not in columns)
    fans: dict[int, list[str]] = {}
    for p in feeding:
        fans.setdefault(p.taken, []).append(p.module)
    group = Group(tuple(columns), row, whole, tuple(tuple(m) for m in fans.values()))
    return group, layouts


def exchanges(derived: Derived) -> dict[Site, Exchange]:
    """Where layouts change in a block."""
    sites: dict[Site, Exchange] = {}
    for group in derived.groups:
        sites |= {(p.module, "input"): FAN_OUT for p in (*group.columns, *group.whole)}
        sites[group.row.module, group.row.edge] = SUM
        for module, dim in group.masks:
            part = Laid(Sharded(dim), Sharded(dim))
            sites[module, MASK] = Exchange(Laid(), part)
    return sites


def declaration(derived: Derived) -> Declaration:
    """As the checker reads it."""
    return Declaration(AXIS, derived.size, derived.parameters, derived.reduced, exchanges(derived))


def _proved(graph: Graph, tried: Derived) -> tuple[tuple[Derived, Checked] | None, str]:
    """The same with the parameters whose gradients have to be summed, if the checker finds nothing
    wrong with it; else what it finds."""
    checked = examined(graph, declaration(tried))
    reduced = frozenset(
        name
        for name, index in graph.parameters.items()
        if checked.gradients[index] == PARTIAL and graph.values[index].learns
    )
    tried = replace(tried, reduced=reduced)
    checked = examined(graph, declaration(tried))
    if checked.findings:
        return None, str(checked.findings[0])
    used = {n for n in tried.parameters if tried.parameters[n] != REPLICATED}
    if not used <= set(graph.parameters):
        return None, "a weight is not used"
    return (tried, checked), ""
