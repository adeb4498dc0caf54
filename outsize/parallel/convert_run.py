"""A module over the workers of an axis, by layouts given by hand.

    placed = Placed(module, axis, {"up.weight": Sharded(0), "down.weight": Sharded(1)})
    y = placed(x)

Parameters lie as they are told to; all else is chosen (outsize/parallel/convert_search.py). The
module is traced over whole shapes on the meta device, once for each shape of its inputs, and the
trace is what runs: each operator on this worker's part, conversions between. Gradients of whole
parameters come out whole on every worker, those of sharded ones as the part that lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from outsize.collectives import Collective
from outsize.errors import OutsizeError, nearest
from outsize.parallel.check_graph import Graph, Node, Ref
from outsize.parallel.check_trace import trace
from outsize.parallel.convert import convert
from outsize.parallel.convert_search import Chosen, Form, Move, choose, unmarked
from outsize.parallel.layouts import REPLICATED, Layout, Sharded, local_size, part_of


class Placed(nn.Module):
    """`module` over the workers of an axis; it keeps this worker's part of the parameters.

    layouts: of parameters by name, whole where not named; a module's path stands for its weight.
    inputs, outputs: how the tensors come and go, whole where not said; all workers call it with
    their parts of the same tensors. Raises OutsizeError for a layout that the shape does not have,
    and for a module that cannot be run like this.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Collective,
        layouts: Mapping[str, Layout],
        inputs: Sequence[Layout] = (),
        outputs: Sequence[Layout] = (),
    ) -> None:
        super().__init__()
        self.module, self.axis = module, axis
        self.layouts = _named(module, layouts)
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._wholes = {
            name: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)
            for name, t in [*module.named_parameters(), *module.named_buffers()]
        }
        self._programs: dict[object, Program] = {}
        for name, layout in self.layouts.items():
            _place(module, name, layout, axis)

    def program(self, args: Any, kwargs: Mapping[str, Any]) -> Program:
        """What runs for arguments of these shapes."""
        leaves, structure = tree_flatten((args, dict(kwargs)))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        wholes = [
            _whole(x, layout, self.axis)
            for x, layout in zip(tensors, self._laid(tensors), strict=True)
        ]
        key = tuple((tuple(x.shape), x.dtype) for x in wholes), str(structure)
        if key not in self._programs:
            metas = iter(wholes)
            named = [next(metas) if isinstance(x, Tensor) else x for x in leaves]
            whole_args, whole_kwargs = tree_unflatten(named, structure)
            self._programs[key] = self._make(whole_args, whole_kwargs, wholes)
        return self._programs[key]

    def _laid(self, tensors: Sequence[Tensor]) -> list[Layout]:
        more = len(tensors) - len(self._inputs)
        return [*self._inputs, *[REPLICATED] * more][: len(tensors)]

    def _make(self, args: Any, kwargs: Any, wholes: Sequence[Tensor]) -> Program:
        graph = unmarked(trace(self.module, args, kwargs, weights=self._wholes))
        more = len(graph.outputs) - len(self._outputs)
        outputs = [*self._outputs, *[REPLICATED] * more]
        laid = self._laid(wholes)
        chosen = choose(graph, self.axis.size, self.layouts, laid, outputs)
        return Program(graph, chosen, self.axis)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        program = self.program(args, kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return program.run(tensors, named)


def _named(module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    found = {}
    for name, layout in layouts.items():
        full = name if name in shapes else f"{name}.weight"
        if full not in shapes:
            raise OutsizeError(f"layouts: parameter {name!r}{nearest(name, list(shapes))}")
        if isinstance(layout, Sharded) and layout.dim >= len(shapes[full]):
            raise OutsizeError(
                f"layouts: {full} is {layout}, and has shape {shapes[full]}; expected a dim below"
                f" {len(shapes[full])}"
            )
        found[full] = layout
    return found


def _place(module: nn.Module, name: str, layout: Layout, axis: Collective) -> None:
    owner, _, leaf = name.rpartition(".")
    whole = module.get_parameter(name)
    part = part_of(whole.detach(), layout, axis.size, axis.rank).clone()
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    module.get_submodule(owner).register_parameter(leaf, parameter)


def _whole(x: Tensor, layout: Layout, axis: Collective) -> Tensor:
    """A meta tensor of the whole's shape; workers' parts are even."""
    shape = list(x.shape)
    if isinstance(layout, Sharded):
        lengths = torch.zeros(axis.size, dtype=torch.int64)
        lengths[axis.rank] = shape[layout.dim]
        shape[layout.dim] = int(axis.all_reduce(lengths).sum())
    return torch.empty(shape, dtype=x.dtype, device="meta")


class Program:
    """A traced module with its layouts: what runs for inputs of one shape."""

    def __init__(self, graph: Graph, chosen: Chosen, axis: Collective) -> None:
        self.graph, self.chosen, self.axis = graph, chosen, axis
        self._layouts: dict[int, Layout] = {}
        for node, gives in zip(graph.nodes, chosen.gives, strict=True):
            self._layouts |= dict(zip(node.outputs, gives, strict=True))
        self._moves: dict[int, list[Move]] = {}
        for move in chosen.moves:
            self._moves.setdefault(move.node, []).append(move)
        self._check()

    def _check(self) -> None:
        """Memory that is written through one view and read through another cannot be copied."""
        written = {node.outputs[0] for node in self.graph.nodes if node.op == "written"}
        for node in self.graph.nodes:
            if written.intersection(node.inputs) and node.op != "written":
                raise OutsizeError(
                    f"layouts: {node.module or 'the module'} reads memory that was written to in"
                    " parts; write it out of place, or leave the module whole"
                )

    def run(self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> Any:
        """The outputs of the module, as they are to lie."""
        have: dict[tuple[int, Form], Tensor] = {}
        first: dict[int, Tensor] = dict(zip(self.graph.inputs, inputs, strict=True))
        first |= {index: named[name] for name, index in self.graph.parameters.items()}
        for number, node in enumerate(self.graph.nodes):
            self._bring(number, first, have)
            if node.op == "written":
                continue
            forms = self.chosen.forms[number]
            taken = {
                value: have.get((value, form), first.get(value))
                for value, form in zip(node.inputs, forms, strict=True)
            }
            outs = self._apply(node, forms, taken)
            first |= dict(zip(node.outputs, outs, strict=True))
        self._bring(len(self.graph.nodes), first, have)
        forms = self.chosen.outputs
        found = [
            have.get((value, form), first[value])
            for value, form in zip(self.graph.outputs, forms, strict=True)
        ]
        return tree_unflatten(found, self.graph.structure)

    def _bring(
        self, number: int, first: Mapping[int, Tensor], have: dict[tuple[int, Form], Tensor]
    ) -> None:
        for move in self._moves.get(number, ()):
            x = have.get((move.value, move.source), first[move.value])
            shape = self.graph.values[move.value].shape
            have[move.value, move.target] = convert(
                x,
                move.source.layout,
                move.target.layout,
                shape,
                self.axis,
                move.target.fanned,
            )

    def _apply(
        self, node: Node, forms: Sequence[Form], taken: Mapping[int, Tensor | None]
    ) -> list[Tensor]:
        args, kwargs = tree_map_only(
            Ref, lambda ref: taken[ref.index], (node.args, dict(node.kwargs))
        )
        run = _out_of_place(node) if node.changes is not None else node.run
        assert run is not None
        args = self._sized(node, args)
        outs = run(*args, **kwargs)
        return [x for x in tree_flatten(outs)[0] if isinstance(x, Tensor)]

    def _sized(self, node: Node, args: Any) -> Any:
        """Arguments that are sizes, as they are of the parts here."""
        shapes = [self._part(index) for index in node.outputs]
        match node.op:
            case "view" | "_unsafe_view" | "reshape" | "expand":
                return (args[0], shapes[0], *args[2:])
            case "split" | "split_with_sizes":
                dim = args[2] if len(args) > 2 else 0
                return (args[0], [shape[dim] for shape in shapes], *args[2:])
            case "slice" if len(args) > 3:
                whole, out = (self.graph.values[i].shape for i in (node.inputs[0], node.outputs[0]))
                if whole == out:
                    return args[:2]
        return args

    def _part(self, index: int) -> tuple[int, ...]:
        shape, layout = self.graph.values[index].shape, self._layouts[index]
        if not isinstance(layout, Sharded):
            return shape
        here = local_size(shape[layout.dim], layout, self.axis.size, self.axis.rank)
        return tuple(here if d == layout.dim else s for d, s in enumerate(shape))


def _out_of_place(node: Node) -> Callable[..., Any]:
    """The operator that gives what an in-place one writes."""
    name, overload = str(node.run).removeprefix("aten.").split(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload)
    return found
