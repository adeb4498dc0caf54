"""A block's own code over parts of its weights: does it compute the parts of what it computed?

The block is traced once more, on the meta device, with weights of the parts' shapes. It is right
when it runs the same operators in the same order between the same tensors, each tensor has the
shape of its part by the layouts that the checker found, and every number that an operator gets is
the same, sizes apart. Code that reshapes by -1 passes as it is. Where code counts heads or features
by attributes, those that make it pass when they are divided by the workers are found by trying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from inspect import unwrap
from itertools import combinations, count
from types import FunctionType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from outsize.parallel.automatic.capture import Arguments
from outsize.parallel.automatic.products import Product
from outsize.parallel.check.checker import Checked
from outsize.parallel.check.graph import Graph, Node, Ref, Site
from outsize.parallel.check.infer import Blank, Even, Found
from outsize.parallel.check.rules import BLANK, UNIFORM
from outsize.parallel.check.trace import MASK, trace
from outsize.parallel.check.views import VIEWS
from outsize.parallel.layouts import REPLICATED, Layout, Sharded, local_size
from outsize.torch_private import tree_leaves

MOST = 8  # attributes among which those to change are looked for: 256 trials
_SIZED = frozenset({*VIEWS, *BLANK, *UNIFORM})
_COPIES = frozenset({"clone", "contiguous", "detach", "alias"})
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})


@dataclass(frozen=True)
class Change:
    """An attribute of a module in a block that counts what a worker has a part of."""

    module: str
    name: str
    whole: int
    local: int


def local_changes(
    block: nn.Module,
    call: Arguments,
    graph: Graph,
    checked: Checked,
    parameters: Mapping[str, Layout],
    columns: Iterable[Product],
    size: int,
) -> tuple[Change, ...] | None:
    """The attributes to change so that the block computes its parts; the fewest that do. None where
    no choice is proved to be right."""
    if _hands_on(graph, checked):
        return None
    own = tuple(c for p in columns for c in _of_column(block, p, size))
    found = dict.fromkeys(_candidates(block, graph, checked, size))
    candidates = sorted(found, key=lambda change: not _read(block, change))[:MOST]
    weights = _parts(block, parameters, size)
    for many in range(len(candidates) + 1):
        for more in combinations(candidates, many):
            changes = (*own, *more)
            if _right(block, call, weights, graph, checked, changes, size):
                return changes
    return None


def _hands_on(graph: Graph, checked: Checked) -> bool:
    """Whether new memory that meets parts leaves the block too: it would have a part's size, and
    the next block may have all."""
    blank = {i for i in graph.outputs if isinstance(checked.values[i], Blank)}
    return any(
        blank.intersection(node.inputs)
        and any(isinstance(checked.values[i], Sharded) for i in node.inputs)
        for node in graph.nodes
    )


def _read(block: nn.Module, change: Change) -> bool:
    """Whether the methods of the module's class, its making apart, speak of such a name."""
    names: set[str] = set()
    for kind in type(block.get_submodule(change.module)).__mro__:
        if kind is nn.Module:
            break
        methods = {k: f for k, f in vars(kind).items() if isinstance(f, FunctionType)}
        for name, method in methods.items():
            if name != "__init__":
                names |= set(unwrap(method).__code__.co_names)
    return change.name.rpartition(".")[2] in names


def _of_column(block: nn.Module, column: Product, size: int) -> Iterator[Change]:
    """A linear layer's own counts of its outputs."""
    for name, value in vars(block.get_submodule(column.module)).items():
        if _counts(value) and value == column.features:
            yield Change(column.module, name, value, value // size)


def _counts(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _candidates(block: nn.Module, graph: Graph, checked: Checked, size: int) -> Iterator[Change]:
    """Whole numbers among the modules' attributes that are sizes of something sharded."""
    sizes = {
        graph.values[i].shape[found.dim]
        for i, found in enumerate(checked.values)
        if isinstance(found, Sharded)
    }
    for path, module in block.named_modules():
        if not any(True for _ in module.children()):
            continue
        own = vars(module)
        config = own.get("config")
        further = {} if config is None else {f"config.{k}": v for k, v in vars(config).items()}
        for name, value in (*own.items(), *further.items()):
            if _counts(value) and value in sizes and value % size == 0:
                yield Change(path, name, value, value // size)


def _parts(block: nn.Module, parameters: Mapping[str, Layout], size: int) -> dict[str, Tensor]:
    named = [*block.named_parameters(), *block.named_buffers()]
    return {
        name: torch.empty(
            _part_shape(tuple(t.shape), parameters.get(name, REPLICATED), size),
            dtype=t.dtype,
            device="meta",
        ).requires_grad_(t.requires_grad)
        for name, t in named
    }


def _part_shape(shape: tuple[int, ...], found: Found, size: int) -> tuple[int, ...]:
    if not isinstance(found, Sharded):
        return shape
    here = local_size(shape[found.dim], found, size, 0)
    return tuple(here if d == found.dim else s for d, s in enumerate(shape))


@contextmanager
def changed(block: nn.Module, changes: tuple[Change, ...]) -> Iterator[None]:
    """The block with its attributes changed, for a while."""
    modules = {change.module: block.get_submodule(change.module) for change in changes}
    before = {path: dict(vars(module)) for path, module in modules.items()}
    try:
        change_all(block, changes)
        yield
    finally:
        for path, module in modules.items():
            vars(module).update(before[path])


def change_all(block: nn.Module, changes: Iterable[Change]) -> None:
    """Change a block's attributes. One of a config changes in a copy that is the module's own."""
    for change in changes:
        module = block.get_submodule(change.module)
        inner, _, name = change.name.rpartition(".")
        if inner:
            setattr(module, inner, copy(getattr(module, inner)))
        setattr(getattr(module, inner) if inner else module, name, change.local)


def _right(
    block: nn.Module,
    call: Arguments,
    weights: dict[str, Tensor],
    graph: Graph,
    checked: Checked,
    changes: tuple[Change, ...],
    size: int,
) -> bool:
    try:
        with changed(block, changes):
            parts = {site: size for site in _masks(graph, checked)}
            local = trace(block, *call, weights=weights, parts=parts)
    except Exception:  # somebody else's code, with a count that it does not expect
        return False
    return _alike(graph, local, checked, size)


def _masks(graph: Graph, checked: Checked) -> Iterator[Site]:
    """Where attention takes its part of a mask."""
    for node in graph.nodes:
        site = node.site
        if site and site[1] == MASK and isinstance(checked.values[node.outputs[0]], Sharded):
            yield site


@dataclass(frozen=True)
class _Step:
    """A node, what it takes and gives by numbers that copies do not count in."""

    node: Node
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _steps(graph: Graph) -> tuple[list[_Step], dict[int, int]]:
    """The nodes without copies, which PyTorch makes or not as memory happens to lie; and the number
    of each value."""
    fresh = count()
    numbers = {index: next(fresh) for index in graph.inputs}

    def number(index: int) -> int:
        if index not in numbers:
            numbers[index] = next(fresh)
        return numbers[index]

    steps = []
    for node in graph.nodes:
        taken = tuple(number(i) for i in node.inputs)
        if node.op in _COPIES:
            numbers[node.outputs[0]] = taken[0]
            continue
        given = tuple(number(i) for i in node.outputs)
        steps.append(_Step(node, "view" if node.op in _VIEWS else node.op, taken, given))
    return steps, numbers


def _alike(whole: Graph, local: Graph, checked: Checked, size: int) -> bool:
    """The same computation over parts."""
    (ours, values), (theirs, others) = _steps(whole), _steps(local)
    back = {number: index for index, number in others.items()}
    if len(ours) != len(theirs) or [values.get(i) for i in whole.outputs] != [
        others.get(i) for i in local.outputs
    ]:
        return False
    for mine, other in zip(whole.outputs, local.outputs, strict=True):
        if whole.values[mine].shape != local.values[other].shape:
            return False  # as zeros for the heads that are here: the next block may have all
    for index, number in values.items():
        if number not in back:
            return False
        shapes = whole.values[index].shape, local.values[back[number]].shape
        if index not in checked.stale and not _fits(*shapes, checked.values[index], size):
            return False
    return all(_same(whole, a, b, checked, size) for a, b in zip(ours, theirs, strict=True))


def _fits(whole: tuple[int, ...], local: tuple[int, ...], found: Found | None, size: int) -> bool:
    if isinstance(found, Blank):  # what is written to it later is looked at
        return True
    if isinstance(found, Even):
        return len(whole) == len(local) and all(
            a == b or (d in found.dims and a == b * size)
            for d, (a, b) in enumerate(zip(whole, local, strict=True))
        )
    return found is not None and _part_shape(whole, found, size) == local


def _same(graph: Graph, a: _Step, b: _Step, checked: Checked, size: int) -> bool:
    whole, local = a.node, b.node
    head = (a.op, whole.module, whole.site, a.inputs, a.outputs)
    if head != (b.op, local.module, local.site, b.inputs, b.outputs):
        return False
    if whole.op == "slice":
        return _same_slice(graph, whole, local, checked, size)
    if whole.op in _SIZED:  # dims are the same where the shapes are; sizes follow from them
        return _dims(whole) == _dims(local)
    return _numbers(whole) == _numbers(local)


def _same_slice(graph: Graph, whole: Node, local: Node, checked: Checked, size: int) -> bool:
    """The slice begins at the same segment."""
    a, b = ((*n.args, 0, 0)[1:3] for n in (whole, local))
    if a[0] != b[0]:
        return False
    found, value = checked.values[whole.inputs[0]], whole.inputs[0]
    shape = graph.values[value].shape
    start = range(shape[a[0]])[a[1] :].start if a[1] else 0
    if not isinstance(found, Sharded) or found.dim != a[0] % len(shape):
        return bool(a[1] == b[1])
    parts = local_size(shape[a[0]], found, size, 0)
    here = b[1] + parts if b[1] < 0 else b[1]
    return bool(here * size == start)


def _numbers(node: Node) -> list[object]:
    return [x for x in tree_leaves((node.args, dict(node.kwargs))) if not isinstance(x, Ref)]


_DIMS = frozenset({"transpose", "permute", "unsqueeze", "squeeze", "cat", "stack", "unbind"})


def _dims(node: Node) -> list[object]:
    return _numbers(node) if node.op in _DIMS else []
