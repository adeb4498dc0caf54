"""The linear layers of a traced block, and which feeds which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from outsize.parallel.check.graph import Graph, Node
from outsize.parallel.check.trace import MASK
from outsize.parallel.check.views import groups

_TURNED = frozenset({"t", "transpose", "permute"})
# What a module is made of whose forward pass is a product and the adding of a bias.
_PLAIN = frozenset({"mark", "view", "_unsafe_view", "linear", "mm", "matmul", "add", *_TURNED})


@dataclass(frozen=True)
class Product:
    """A module that multiplies by a matrix. weight, bias: names of its parameters; outer: the dim
    of the weight that its output has; taken, made: the values that it is given and that it
    computes; edge: where its product can be met, before the bias; features, inputs: sizes."""

    module: str
    weight: str
    bias: str | None
    outer: int
    taken: int
    made: int
    edge: str
    features: int
    inputs: int


def products(graph: Graph, block: nn.Module) -> list[Product]:
    """The linear layers in the order in which they run: modules that do nothing but multiply by one
    matrix, once, and add a bias."""
    modules = dict(block.named_modules())
    names = {index: name for name, index in graph.parameters.items()}
    by_module: dict[str, list[Node]] = {}
    for node in graph.nodes:
        by_module.setdefault(node.module, []).append(node)
    found = [
        _product(graph, path, nodes, names)
        for path, nodes in by_module.items()
        if path and not any(True for _ in modules[path].children())
    ]
    return sorted((p for p in found if p is not None), key=lambda p: p.made)


def _product(graph: Graph, path: str, nodes: list[Node], names: dict[int, str]) -> Product | None:
    if any(node.op not in _PLAIN for node in nodes):
        return None
    turned: dict[int, int] = {}  # value -> the weight that it is, turned round
    multiplied = []
    for node in nodes:
        if node.op in _TURNED and node.inputs[0] in names:
            turned |= {node.outputs[0]: node.inputs[0]}
        elif node.op in ("linear", "mm", "matmul"):
            multiplied.append(node)
    if len(multiplied) != 1:
        return None
    (node,) = multiplied
    factor = node.inputs[1]
    weight = turned.get(factor, factor)
    if weight not in names or len(graph.values[weight].shape) != 2:
        return None
    outer = int((node.op == "linear") == (factor in turned))
    added = [n for n in nodes if n.op == "add"]
    bias = next((names[i] for n in added for i in n.inputs if i in names), None)
    if len(added) > 1 or bool(added) != (bias is not None):
        return None
    taken = next(n.inputs[0] for n in nodes if n.site == (path, "input"))
    edge = next((n.site[1] for n in nodes if n.site == (path, "product")), "output")
    if bias is not None and edge == "output":
        return None
    shape = graph.values[weight].shape
    made = node.outputs[0]
    name = names[weight]
    return Product(path, name, bias, outer, taken, made, edge, shape[outer], shape[1 - outer])


def sources(
    graph: Graph, here: Sequence[Product], row: Product
) -> tuple[list[Product], tuple[Node, ...]]:
    """The linear layers that a layer's input comes from, none between; and where masks of heads
    enter on the way."""
    made = {p.made: p for p in here}
    maker = {out: node for node in graph.nodes for out in node.outputs}
    found, masks = dict[str, Product](), list[Node]()
    open_, seen = [row.taken], set[int]()
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in made:
            found[made[value].module] = made[value]
        elif value in maker:
            node = maker[value]
            if node.site is not None and node.site[1] == MASK:
                masks.append(node)
            open_ += node.inputs
    return sorted(found.values(), key=lambda p: p.made), tuple(masks)


def segments(graph: Graph, column: Product) -> tuple[int, ...]:
    """The lengths into which a layer's output is taken apart, one after the other."""
    users: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for index in node.inputs:
            users.setdefault(index, []).append(node)
    last = len(graph.values[column.made].shape) - 1
    ends = {0, column.features, *_ends(graph, users, column.made, last, 1)}
    return tuple(b - a for a, b in pairwise(sorted(ends)))


def _ends(
    graph: Graph, users: dict[int, list[Node]], value: int, dim: int, unit: int
) -> Iterator[int]:
    """Where slices of a dim begin and end, in features; a row of the dim has `unit` of them."""
    shape = graph.values[value].shape
    for node in users.get(value, ()):
        out = graph.values[node.outputs[0]].shape
        if node.op in ("mark", "add", "detach", "clone") and out == shape:
            yield from _ends(graph, users, node.outputs[0], dim, unit)
        elif node.op in ("view", "_unsafe_view"):
            target = _target(shape, out, dim)
            if target is not None:
                wider = unit * shape[dim] // out[target]
                yield from _ends(graph, users, node.outputs[0], target, wider)
        elif node.op in ("split", "split_with_sizes", "chunk"):
            if _dim_of(node, 2, shape) == dim:
                sizes = [graph.values[o].shape[dim] for o in node.outputs]
                yield from (end * unit for end in accumulate(sizes))
        elif node.op == "slice" and _dim_of(node, 1, shape) == dim:
            first = node.args[2] if len(node.args) > 2 else 0
            last = node.args[3] if len(node.args) > 3 else None
            start, stop, _ = slice(first, last).indices(shape[dim])
            yield from (start * unit, stop * unit)


def _target(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    """The dim whose rows are runs of rows of a dim before a view."""
    for before, after in groups(old, new):
        if dim in range(*before):
            first = next((d for d in range(*after) if new[d] != 1), None)
            outer = any(old[d] != 1 for d in range(before[0], dim))
            return None if first is None or outer or old[dim] % new[first] else first
    return None


def _dim_of(node: Node, place: int, shape: tuple[int, ...]) -> int:
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(dim) % len(shape)
