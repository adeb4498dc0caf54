"""The checker: layouts through a whole model on one mesh axis, at plan time, on meta tensors.

Forward, a rule for each operator says how what it gives lies (outsize/parallel/check/rules.py).
Backward no rules are needed, for a derivative is linear in the gradient that comes: the gradient of
what is sharded is sharded; of a summand it is that of the sum; of what is replicated it is partial
where each worker goes on with a part, and else as it comes. Where a tensor is used twice its
gradients add, so whole and partial ones must not meet. What is left at the parameters is what the
optimizer would get.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outsize.errors import OutsizeError
from outsize.parallel.check.graph import Graph, Node, Site
from outsize.parallel.check.infer import Blank, Even, Found, infer, whole
from outsize.parallel.check.refusal import Refusal
from outsize.parallel.layouts import (
    PARTIAL,
    REPLICATED,
    Exchange,
    Laid,
    Layout,
    Sharded,
    dual,
    operation,
)


@dataclass(frozen=True)
class Known:
    """A module that is not looked into: it communicates by itself. takes, gives: layouts of the
    first tensor in and of what comes out."""

    takes: Layout
    gives: Layout


@dataclass(frozen=True)
class Declaration:
    """How a module is spread over the workers of one axis.

    parameters: layouts by name; those not named are whole. reduced: names of parameters whose
    gradients are summed over the axis. exchanges: where layouts change, by (path of a module,
    "input" | "product" | "output"), where "product" is a linear layer's before its bias.
    inputs, outputs: of the whole module, in order; whole where not named. The loss is what takes
    the outputs. known: modules by path.
    """

    axis: str
    size: int
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    reduced: frozenset[str] = frozenset()
    exchanges: Mapping[Site, Exchange] = field(default_factory=dict)
    inputs: tuple[Laid, ...] = ()
    outputs: tuple[Laid, ...] = ()
    known: Mapping[str, Known] = field(default_factory=dict)

    def layout(self, name: str) -> Layout:
        """The layout of a parameter's value."""
        return self.parameters.get(name, REPLICATED)


@dataclass(frozen=True)
class Finding:
    """One thing that would make the numbers wrong. missing: the collective that is not there."""

    module: str
    tensor: str
    axis: str
    what: str
    missing: str

    def __str__(self) -> str:
        where = self.module or "the model"
        return (
            f"layouts: {where}, {self.tensor}, axis {self.axis}: {self.what}; missing:"
            f" {self.missing}"
        )


@dataclass
class Checked:
    """Layouts of all values of a graph, None where something before it is wrong."""

    values: list[Found | None]
    gradients: list[Layout | None] = field(default_factory=list)
    stale: dict[int, Refusal] = field(default_factory=dict)  # values that nobody may use any more
    findings: list[Finding] = field(default_factory=list)


def examined(graph: Graph, declared: Declaration) -> Checked:
    """The layouts of everything in a module spread like this, with what is wrong."""
    checked = forward(graph, declared, tuple(laid.value for laid in declared.inputs))
    checked.findings += _outputs(graph, declared, checked)
    backward(graph, declared, checked, [laid.gradient for laid in declared.outputs])
    checked.findings += (*_parameters(graph, declared, checked), *_unused(graph, declared))
    return checked


def refuse(findings: Sequence[Finding]) -> None:
    """Raises OutsizeError with the first finding and the number of others."""
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise OutsizeError(f"{findings[0]}{more}")


def forward(graph: Graph, declared: Declaration, given: Sequence[Layout]) -> Checked:
    """Layouts of values, of the inputs `given` (whole where none is)."""
    names = {index: name for name, index in graph.parameters.items()}
    checked = Checked([REPLICATED] * len(graph.values))
    for index, name in names.items():
        checked.values[index] = declared.layout(name)
    for index, value in zip(graph.inputs, given, strict=False):
        checked.values[index] = value
    for node in graph.nodes:
        try:
            found = _apply(graph, node, declared, checked)
        except Refusal as refusal:
            if node.op == "written":  # wrong only if somebody looks at that memory again
                checked.stale[node.outputs[0]] = refusal
                checked.values[node.outputs[0]] = None
                continue
            checked.findings.append(_finding(graph, node, declared.axis, refusal))
            found = (None,) * len(node.outputs)
        for index, layout in zip(node.outputs, found, strict=True):
            checked.values[index] = layout
    return checked


def _apply(
    graph: Graph, node: Node, declared: Declaration, checked: Checked
) -> Sequence[Found | None]:
    for index in node.inputs:
        if index in checked.stale:
            raise checked.stale[index]
    layouts = [checked.values[i] for i in node.inputs]
    solid = [x for x in layouts if x is not None]
    if len(solid) < len(layouts):
        return (None,) * len(node.outputs)
    if node.op == "module":
        known = declared.known[node.module]
        _expect(known.takes, solid[0], "the module takes")
        return (known.gives,) * len(node.outputs)
    exchange = declared.exchanges.get(node.site) if node.site else None
    if exchange is None:
        return infer(graph, node, tuple(solid), declared.size)
    _expect(exchange.before.value, solid[0], "what is exchanged here is")
    return (exchange.after.value,)


def _expect(wanted: Layout, found: Found, said: str) -> None:
    if isinstance(found, Blank) or found == wanted or (whole(found) and whole(wanted)):
        return
    plain = REPLICATED if isinstance(found, Even) else found
    raise Refusal(f"{said} {wanted}, and comes {found}", operation(plain, wanted))


def _finding(graph: Graph, node: Node, axis: str, refusal: Refusal) -> Finding:
    tensor = graph.values[node.inputs[0]].name if node.inputs else node.op
    module = node.site[0] if node.site else node.module
    return Finding(module, tensor, axis, refusal.what, refusal.missing)


def _outputs(graph: Graph, declared: Declaration, checked: Checked) -> Iterator[Finding]:
    """What the loss takes is what it gets."""
    for index, laid in zip(graph.outputs, _padded(declared.outputs, graph), strict=True):
        given, wanted = checked.values[index], laid.value
        if given is None or isinstance(given, Blank):
            continue
        found = REPLICATED if isinstance(given, Even) else given
        if found == wanted:
            continue
        what = f"the loss takes what is {wanted}, and gets what is {found}"
        if found == REPLICATED and isinstance(wanted, Sharded):
            what += f": it would count each class {declared.size} times"
        name = graph.values[index].name
        yield Finding("the loss", name, declared.axis, what, operation(found, wanted))


def _padded(laid: Sequence[Laid], graph: Graph) -> list[Laid]:
    return [*laid, *[Laid()] * (len(graph.outputs) - len(laid))][: len(graph.outputs)]


def backward(
    graph: Graph, declared: Declaration, checked: Checked, given: Sequence[Layout | None]
) -> None:
    """Layouts of gradients, from those `given` of the outputs (by transposition, where none is);
    adds what is wrong to the findings."""
    needed = _needed(graph)
    gradients: list[Layout | None] = [None] * len(graph.values)
    checked.gradients = gradients
    for place, index in enumerate(graph.outputs):
        value = checked.values[index]
        if needed[index] and value is not None and not isinstance(value, Blank):
            named = given[place] if place < len(given) else None
            plain = REPLICATED if isinstance(value, Even) else value
            gradients[index] = named or dual(plain)
    told: set[int] = set()
    for node in reversed(graph.nodes):
        for out in node.outputs:
            grad = gradients[out]
            if grad is None or checked.values[out] is None:
                continue
            for index in node.inputs:
                if needed[index]:
                    _pass(graph, declared, checked, node, index, out, told)


def _pass(
    graph: Graph,
    declared: Declaration,
    checked: Checked,
    node: Node,
    index: int,
    out: int,
    told: set[int],
) -> None:
    """The gradient of one output reaches one input."""
    value, result, grad = checked.values[index], checked.values[out], checked.gradients[out]
    if value is None or result is None or grad is None:
        return
    exchange = declared.exchanges.get(node.site) if node.site else None
    if exchange is not None:
        wrong = _crossed(exchange, grad, declared.size)
        if wrong is not None and index not in told:
            told.add(index)
            checked.findings.append(_finding(graph, node, declared.axis, wrong))
        new: Layout = exchange.before.gradient
    else:
        new = transposed(value, result, grad)
    old = checked.gradients[index]
    if old is not None and old != new and index not in told:
        told.add(index)
        what = (
            f"its gradient is {new} from here and {old} from elsewhere: their sum is neither, and"
            f" a collective would count one {declared.size} times"
        )
        missing = f"all_reduce of the gradient where it is {PARTIAL}"
        name = graph.values[index].name
        partial_here = node if new == PARTIAL else _other(graph, checked, index)
        module = (partial_here.site or (partial_here.module,))[0]
        checked.findings.append(Finding(module, name, declared.axis, what, missing))
    checked.gradients[index] = PARTIAL if PARTIAL in (old, new) else new


def _other(graph: Graph, checked: Checked, index: int) -> Node:
    """The user of a value whose gradient is partial."""
    users = [node for node in graph.nodes if index in node.inputs]
    return next(
        (
            u
            for u in users
            if any(
                checked.gradients[o] == PARTIAL or isinstance(checked.values[o], Sharded)
                for o in u.outputs
            )
        ),
        users[0],
    )


def transposed(value: Found, result: Found, grad: Layout) -> Layout:
    """The layout of the gradient of a value, where what an operator made of it has one."""
    if isinstance(value, Blank):
        return grad
    if isinstance(value, Sharded):
        return value
    if value == PARTIAL:
        return grad
    return grad if whole(result) else PARTIAL


def _crossed(exchange: Exchange, grad: Layout, size: int) -> Refusal | None:
    """What is wrong with a gradient that comes back to an exchange."""
    wanted = exchange.after.gradient
    if grad == wanted:
        return None
    if wanted == PARTIAL:
        return Refusal(
            f"the gradient is {grad} and would be summed all the same, {size} times too large",
            "nothing: take the sum of the gradient away",
        )
    return Refusal(
        f"the gradient comes back {grad} where {wanted} is expected", operation(grad, wanted)
    )


def _needed(graph: Graph) -> list[bool]:
    """Which values have a gradient: floating ones that come of a parameter, and the inputs."""
    needed = [value.learns for value in graph.values]
    for index in graph.inputs:
        needed[index] = graph.values[index].floats
    for node in graph.nodes:
        if any(needed[i] for i in node.inputs):
            for out in node.outputs:
                needed[out] = graph.values[out].floats
    return needed


def _parameters(graph: Graph, declared: Declaration, checked: Checked) -> Iterator[Finding]:
    """No partial gradient enters the optimizer, and none is summed that is whole."""
    for name, index in graph.parameters.items():
        grad = checked.gradients[index]
        if grad is None or not graph.values[index].learns:
            continue
        yield from parameter(name, declared, grad)


def parameter(name: str, declared: Declaration, grad: Layout) -> Iterator[Finding]:
    """What is wrong with the gradient of one parameter."""
    copies = isinstance(grad, Sharded) and grad.copies > 1
    module, _, leaf = name.rpartition(".")
    if (grad == PARTIAL or copies) and name not in declared.reduced:
        what = "its gradient is partial and enters the optimizer as it is"
        yield Finding(module, leaf, declared.axis, what, "all_reduce of the gradient")
    elif name in declared.reduced and not (grad == PARTIAL or copies):
        what = f"its gradient is {grad} and summed over the axis, {declared.size} times too large"
        yield Finding(module, leaf, declared.axis, what, "nothing: do not sum it")


def _unused(graph: Graph, declared: Declaration) -> Iterator[Finding]:
    """Exchanges and parameters that are declared of places that there are not."""
    sites = {node.site for node in graph.nodes}
    for module, edge in declared.exchanges:
        if (module, edge) not in sites:
            what = f"an exchange at its {edge} is declared, and nothing passes there"
            yield Finding(module, edge, declared.axis, what, "a module of this path that is called")
    for name in sorted({*declared.parameters, *declared.reduced} - set(graph.parameters)):
        module, _, leaf = name.rpartition(".")
        what = "a layout is declared, and the module does not use such a parameter"
        yield Finding(module, leaf, declared.axis, what, "a parameter of this name")
