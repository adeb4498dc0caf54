"""What a node makes of layouts: its rule, and what needs none.

What all workers compute from the same is the same, so an operator without a rule takes replicated
tensors and gives replicated ones. Memory that is not written to yet, and rows that are all alike,
lie as they are asked to.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.parallel.check.graph import Graph, Node
from outsize.parallel.check.refusal import Call, Refusal, mend
from outsize.parallel.check.rules import BLANK, RULES, UNIFORM
from outsize.parallel.layouts import REPLICATED, Layout, Replicated, Sharded


@dataclass(frozen=True)
class Blank:
    """Memory that nothing was written to yet, or zeros: it lies as whatever is written."""


@dataclass(frozen=True)
class Even:
    """Replicated, and all rows along each of these dims are the same: a worker's part of them is as
    many of them as it asks for."""

    dims: frozenset[int]

    def __str__(self) -> str:
        return "replicated"


BLANKS = Blank()
Found = Layout | Blank | Even


def infer(graph: Graph, node: Node, layouts: tuple[Found, ...], n: int) -> tuple[Found, ...]:
    """The layouts that a node gives for those that it takes. Raises Refusal."""
    if node.op in BLANK:
        return (BLANKS,) * len(node.outputs)
    if node.op in UNIFORM or (node.op == "fill" and isinstance(layouts[0], Blank)):
        return (Even(frozenset(range(len(graph.values[node.outputs[0]].shape)))),)
    if node.op == "written":
        return (_written(layouts),)
    solid = next((i for i, x in enumerate(layouts) if not isinstance(x, Blank)), None)
    if solid is None:
        return (BLANKS if layouts else REPLICATED,) * len(node.outputs)
    if node.op == "copy" and isinstance(layouts[0], Blank):
        return (layouts[1],)
    shapes = [graph.values[i].shape for i in node.inputs]
    like = [
        layouts[solid] if s == shapes[solid] else Even(frozenset(range(len(s)))) for s in shapes
    ]
    filled = [b if isinstance(a, Blank) else a for a, b in zip(layouts, like, strict=True)]
    if any(isinstance(x, Even) for x in filled):
        return _even(graph, node, filled, n)
    return _ruled(graph, node, tuple(x for x in filled if not isinstance(x, (Blank, Even))), n)


def whole(found: Found) -> bool:
    """Whether all workers have the same."""
    return isinstance(found, (Replicated, Even))


def _even(graph: Graph, node: Node, layouts: list[Found], n: int) -> tuple[Found, ...]:
    """Tensors of equal rows lie as others need them to, or pass on that their rows are equal."""
    evens = [x for x in layouts if isinstance(x, Even)]
    wanted = next((x for x in layouts if isinstance(x, Sharded)), None)
    plain = [REPLICATED if isinstance(x, Even) else x for x in layouts]
    if wanted is None and len(layouts) > 1:
        return _ruled(graph, node, tuple(plain), n)  # type: ignore[arg-type]
    shapes = [graph.values[i].shape for i in node.inputs]
    found: set[int] = set()
    for dim in sorted(evens[0].dims):
        cut = Sharded(dim) if wanted is None else wanted.at(dim)
        tried = [
            cut if isinstance(x, Even) and dim in x.dims and dim < len(s) else p
            for x, p, s in zip(layouts, plain, shapes, strict=True)
        ]
        try:
            outs = _ruled(graph, node, tuple(tried), n)  # type: ignore[arg-type]
        except Refusal:
            continue
        if wanted is not None:
            return outs
        found |= {out.dim for out in outs[:1] if isinstance(out, Sharded)}
    if wanted is None and len(node.outputs) == 1 and found:
        return (Even(frozenset(found)),)
    return _ruled(graph, node, tuple(plain), n)  # type: ignore[arg-type]


def _ruled(graph: Graph, node: Node, solid: tuple[Layout, ...], n: int) -> tuple[Found, ...]:
    if all(x == REPLICATED for x in solid):
        return (_grown(graph, node),) if node.op == "expand" else (REPLICATED,) * len(node.outputs)
    shapes = tuple(graph.values[i].shape for i in node.inputs)
    out = tuple(graph.values[i].shape for i in node.outputs)
    rule = RULES.get(node.op)
    if rule is None:
        shown = ", ".join(str(x) for x in solid)
        raise Refusal(
            f"{node.op} takes {shown}; no rule says what comes of it", mend(solid[0], REPLICATED)
        )
    found = rule(Call(node.op, solid, shapes, _plain(node), node.kwargs, out, n))
    return tuple(found) if isinstance(found, list) else (found,) * len(node.outputs)


def _grown(graph: Graph, node: Node) -> Found:
    old, new = (graph.values[i].shape for i in (node.inputs[0], node.outputs[0]))
    old = (1,) * (len(new) - len(old)) + old
    dims = frozenset(d for d, (a, b) in enumerate(zip(old, new, strict=True)) if a == 1 != b)
    return Even(dims) if dims else REPLICATED


def _plain(node: Node) -> tuple[object, ...]:
    """Arguments by place; those that are usually named are put behind."""
    args = tuple(node.args)
    dim = node.kwargs.get("dim")
    return (*args, dim) if dim is not None and len(args) == 1 else args


def _written(layouts: tuple[Found, ...]) -> Found:
    """A tensor whose memory was written to through another view of it."""
    old, new = layouts
    if isinstance(old, Blank) or isinstance(new, Blank):
        return new if isinstance(old, Blank) else old
    if whole(old) and whole(new):
        return REPLICATED
    if type(old) is not type(new):
        raise Refusal(f"what is {new} is written into memory that is {old}", "all_gather")
    return old
