"""Which layouts the operators of a module work in, and which conversions that takes: the fewest
bytes.

Parameters, inputs and outputs lie as they are told to. Every operator may work in any layouts that
its rule allows (the signatures of OneFlow; Yuan et al., 2021, SBP signatures); between what is made
and what is taken stand conversions. OneFlow chooses operator by operator. Here the choice is by
dynamic programming along the operators: a state is how the tensors lie that are still needed, in
all layouts that they were brought into, so that a conversion is paid for once however many take
what it makes. A state that another one reaches for no more, by conversions, is dropped; the
choice is exact while no more than WIDTH are left, and else over the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from torch.utils._pytree import tree_map_only

from outsize.errors import OutsizeError
from outsize.parallel.check_graph import Graph, Node, Ref
from outsize.parallel.check_infer import Blank, Even, infer
from outsize.parallel.check_refusal import Refusal
from outsize.parallel.convert import cost
from outsize.parallel.layouts import PARTIAL, REPLICATED, Layout, Sharded

WIDTH = 512


@dataclass(frozen=True)
class Form:
    """A tensor in a layout; fanned: whole, and each worker goes on with a part."""

    layout: Layout
    fanned: bool = False


@dataclass(frozen=True)
class Move:
    """A value brought from one form into another, before a node (its number; the number of nodes:
    for the outputs)."""

    node: int
    value: int
    source: Form
    target: Form


@dataclass(frozen=True)
class Chosen:
    """forms: what each node takes; gives: layouts of its outputs; moves in order; received: bytes
    that each worker has from the others in one forward and backward pass."""

    forms: tuple[tuple[Form, ...], ...]
    gives: tuple[tuple[Layout, ...], ...]
    outputs: tuple[Form, ...]
    moves: tuple[Move, ...]
    received: float


Have = frozenset[Form]  # the forms that a value is in
State = tuple[tuple[int, Have], ...]  # of the values that are needed still, in order


@dataclass(frozen=True)
class _Path:
    """The cheapest way to a state."""

    cost: float
    before: _Path | None = None
    forms: tuple[Form, ...] = ()
    gives: tuple[Layout, ...] = ()
    moves: tuple[Move, ...] = ()


def choose(
    graph: Graph,
    n: int,
    parameters: Mapping[str, Layout],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
) -> Chosen:
    """The cheapest layouts for all operators of a module on n workers (of a graph that `unmarked`
    gave). Raises OutsizeError where an operator works in no layout that can be reached."""
    search = _Search(graph, n)
    start = search.start(parameters, inputs)
    paths = {start: _Path(0.0)}
    for number, node in enumerate(graph.nodes):
        paths = search.step(number, node, paths)
    return search.finish(paths, [Form(layout) for layout in outputs])


def unmarked(graph: Graph) -> Graph:
    """A graph without the nodes that only mark a place: what passes them is one tensor."""
    same: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        inputs = tuple(same.get(i, i) for i in node.inputs)
        if node.op == "mark":
            same[node.outputs[0]] = inputs[0]
            continue
        args, kwargs = tree_map_only(
            Ref, lambda ref: Ref(same.get(ref.index, ref.index)), (node.args, dict(node.kwargs))
        )
        nodes.append(replace(node, inputs=inputs, args=args, kwargs=kwargs))
    outputs = tuple(same.get(i, i) for i in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


class _Search:
    def __init__(self, graph: Graph, n: int) -> None:
        self.graph, self.n = graph, n
        self.learns = _learning(graph)
        self._ways: dict[object, tuple[float, Form] | None] = {}
        self.last = {v: len(graph.nodes) for v in graph.outputs}
        for number, node in reversed(list(enumerate(graph.nodes))):
            for value in node.inputs:
                self.last.setdefault(value, number)

    def start(self, parameters: Mapping[str, Layout], inputs: Sequence[Layout]) -> State:
        """How everything lies that no operator makes."""
        made = {v for node in self.graph.nodes for v in node.outputs}
        names = {index: name for name, index in self.graph.parameters.items()}
        given = dict(zip(self.graph.inputs, inputs, strict=False))
        have = {
            v: parameters.get(names[v], REPLICATED) if v in names else given.get(v, REPLICATED)
            for v in self.last
            if v not in made
        }
        return tuple(sorted((v, frozenset({Form(x)})) for v, x in have.items()))

    def step(self, number: int, node: Node, paths: dict[State, _Path]) -> dict[State, _Path]:
        """Every state after a node."""
        signatures = list(self._signatures(node))
        if not signatures:
            raise OutsizeError(
                f"layouts: {node.op} in {node.module or 'the module'} works in no layout; write it"
                " out of place, or leave the module whole"
            )
        after: dict[State, _Path] = {}
        for state, path in paths.items():
            for forms, gives in signatures:
                new = self._after(number, node, dict(state), path, forms, gives)
                if new is not None and new[1].cost < after.get(new[0], _FAR).cost:
                    after[new[0]] = new[1]
        return self._kept(after)

    def _kept(self, states: Mapping[State, _Path]) -> dict[State, _Path]:
        """States without those that others reach for no more, by conversions alone."""
        kept: dict[State, _Path] = {}
        for state, path in sorted(states.items(), key=lambda p: p[1].cost + self._owed(p[0])):
            if not any(self._reaches(k, p.cost, state, path.cost) for k, p in kept.items()):
                kept[state] = path
            if len(kept) == WIDTH:
                break
        return kept

    def _owed(self, state: State) -> float:
        """What is still to be paid for sums: else states that put them off would seem cheapest."""
        owed = 0.0
        for value, have in state:
            if all(form.layout == PARTIAL for form in have):
                brought = self._best(value, have, Form(REPLICATED))
                owed += 0.0 if brought is None else brought[0]
        return owed

    def _reaches(self, source: State, spent: float, target: State, limit: float) -> bool:
        for (value, have), (_, wanted) in zip(source, target, strict=True):
            for form in wanted - have:
                if spent > limit:
                    return False
                brought = self._best(value, have, form)
                spent += _FAR.cost if brought is None else brought[0]
        return spent <= limit

    def _after(
        self,
        number: int,
        node: Node,
        have: dict[int, Have],
        path: _Path,
        forms: tuple[Form, ...],
        gives: tuple[Layout, ...],
    ) -> tuple[State, _Path] | None:
        total, moves = path.cost, list[Move]()
        for value, form in zip(node.inputs, forms, strict=True):
            brought = self._bring(number, value, have, form)
            if brought is None:
                return None
            more, move = brought
            total += more
            if move is not None:
                moves.append(move)
                have[value] |= {form}
        for value, layout in zip(node.outputs, gives, strict=True):
            have[value] = frozenset({Form(layout)})
        kept = tuple(sorted((v, x) for v, x in have.items() if self.last.get(v, -1) > number))
        return kept, _Path(total, path, forms, gives, tuple(moves))

    def _bring(
        self, number: int, value: int, have: Mapping[int, Have], form: Form
    ) -> tuple[float, Move | None] | None:
        """What it costs to have a value in a form."""
        if form in have[value] or (form.fanned and not self.learns[value]):
            plain = Form(form.layout)
            if form in have[value] or plain in have[value]:
                return 0.0, None
        best = self._best(value, have[value], form)
        return None if best is None else (best[0], Move(number, value, best[1], form))

    def _best(self, value: int, have: Have, form: Form) -> tuple[float, Form] | None:
        """The cheapest way to a form from those that are there."""
        key = value, have, form
        if key not in self._ways:
            facts = self.graph.values[value]
            size = prod(facts.shape), facts.dtype.itemsize, self.n, self.learns[value]
            ways = [
                (cost(s.layout, form.layout, *size, form.fanned), str(s), s)
                for s in have
                if not s.fanned and _possible(s.layout, form.layout)
            ]
            found = min(ways, default=None)
            self._ways[key] = None if found is None else (found[0], found[2])
        return self._ways[key]

    def _signatures(self, node: Node) -> Iterator[tuple[tuple[Form, ...], tuple[Layout, ...]]]:
        """What a node can take, and what it then gives."""
        shapes = [self.graph.values[v].shape for v in node.inputs]
        for layouts in product(*(_layouts(shape, self.n) for shape in shapes)):
            try:
                found = infer(self.graph, node, layouts, self.n)
            except Refusal:
                continue
            gives = tuple(REPLICATED if isinstance(x, (Blank, Even)) else x for x in found)
            if any(isinstance(x, Sharded) and x.segments for x in gives):
                continue
            apart = any(x != REPLICATED for x in gives)
            yield tuple(Form(x, apart and x == REPLICATED) for x in layouts), gives

    def finish(self, paths: dict[State, _Path], outputs: list[Form]) -> Chosen:
        """The cheapest state, with what its outputs still need."""
        best: tuple[_Path, list[Move]] | None = None
        for state, path in paths.items():
            have, total, moves = dict(state), path.cost, list[Move]()
            for value, form in zip(self.graph.outputs, outputs, strict=False):
                brought = self._bring(len(self.graph.nodes), value, have, form)
                total += _FAR.cost if brought is None else brought[0]
                moves += [] if brought is None or brought[1] is None else [brought[1]]
            if best is None or total < best[0].cost:
                best = _Path(total, path), moves
        assert best is not None, "there is a state at least"
        return _collected(best[0], best[1], tuple(outputs))


_FAR = _Path(float("inf"))


def _collected(end: _Path, moves: list[Move], outputs: tuple[Form, ...]) -> Chosen:
    steps = []
    path = end.before
    while path is not None and path.before is not None:
        steps.append(path)
        path = path.before
    steps.reverse()
    every = (*(move for step in steps for move in step.moves), *moves)
    forms, gives = tuple(s.forms for s in steps), tuple(s.gives for s in steps)
    return Chosen(forms, gives, outputs, every, end.cost)


def _layouts(shape: tuple[int, ...], n: int) -> list[Layout]:
    cuts = [Sharded(d) for d, size in enumerate(shape) if size >= n]
    return [REPLICATED, PARTIAL, *cuts]


def _possible(source: Layout, target: Layout) -> bool:
    """Segments stay as they are."""
    segmented = any(isinstance(x, Sharded) and x.segments for x in (source, target))
    return source == target or not segmented


def _learning(graph: Graph) -> list[bool]:
    """Which values have a gradient."""
    learns = [value.learns for value in graph.values]
    for index in graph.inputs:
        learns[index] = graph.values[index].floats
    for node in graph.nodes:
        if any(learns[i] for i in node.inputs):
            for out in node.outputs:
                learns[out] = graph.values[out].floats
    return learns
