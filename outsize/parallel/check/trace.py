"""What a module computes, as a list of operators over whole shapes, traced on the meta device.

Operators come from two places. Functions that are one thing to layouts but many operators to
PyTorch (a linear layer, a product of batches, attention, a norm) are taken as they are called; all
else as the dispatcher sees it. Where modules take and give tensors is written down too, as nodes
that do nothing: there, layouts may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from outsize.parallel.check.graph import Graph, Node, Ref, Site, Value
from outsize.parallel.check.shapes import shaped
from outsize.torch_private import DispatchMode, storage_key, tree_flatten, tree_map_only

MASK = "mask"  # where a mask that has a part for each head enters attention
# Functions that are taken whole, by the name that their rule has.
COMPOSITE: Mapping[Callable[..., Any], str] = {
    F.linear: "linear",
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    torch.bmm: "matmul",
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    F.softmax: "softmax",
    F.log_softmax: "log_softmax",
    F.cross_entropy: "cross_entropy",
}


class Recorder:
    """Writes down operators while its modes are active."""

    def __init__(self, named: Mapping[str, Tensor], parts: Mapping[Site, int]) -> None:
        self.parts = parts
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.parameters: dict[str, int] = {}
        self.path = [""]
        self.asleep = 0
        self._index: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id is good only as long as its tensor lives
        self._storage: dict[int, list[Tensor]] = {}
        self._named = {id(tensor): name for name, tensor in named.items()}

    def add(self, tensor: Tensor, name: str) -> int:
        """A new value for this tensor, whatever it stood for before."""
        self._index[id(tensor)] = index = len(self.values)
        learns = tensor.requires_grad and tensor.is_leaf
        self.values.append(Value(tuple(tensor.shape), tensor.dtype, name, learns))
        self._kept.append(tensor)
        self._storage.setdefault(storage_key(tensor), []).append(tensor)
        return index

    def index(self, tensor: Tensor) -> int:
        """The value that a tensor stands for now."""
        known = self._index.get(id(tensor))
        if known is not None:
            return known
        name = self._named.get(id(tensor))
        index = self.add(tensor, name or "a constant")
        if name is not None:
            self.parameters[name] = index
        return index

    def node(
        self,
        op: str,
        run: Callable[..., Any] | None,
        args: Any,
        kwargs: Mapping[str, Any],
        outs: Any,
        site: Site | None = None,
        changed: Tensor | None = None,
    ) -> None:
        """Write an operator down with what it gave."""
        seen: list[int] = []

        def refer(tensor: Tensor) -> Ref:
            seen.append(self.index(tensor))
            return Ref(seen[-1])

        args, kwargs = tree_map_only(Tensor, refer, (args, dict(kwargs)))
        module = self.path[-1]
        name = f"{op} in {module}" if module else op
        if op == "mark":
            name = self.values[seen[0]].name
        found = [t for t in tree_flatten(outs)[0] if isinstance(t, Tensor)]
        outputs = tuple(self.add(t, name) for t in found)
        self.nodes.append(Node(op, run, args, kwargs, tuple(seen), outputs, module, site))
        if changed is not None:
            self._spread(changed, outputs[0])

    def _spread(self, changed: Tensor, written: int) -> None:
        """Other views of memory that an operator has written to have changed as well."""
        others = self._storage[storage_key(changed)]
        unique = {id(t): t for t in others if t is not changed}
        for other in unique.values():
            old = self._index[id(other)]
            self._index[id(other)] = new = len(self.values)
            self.values.append(self.values[old])
            self.nodes.append(Node("written", None, (), {}, (old, written), (new,), self.path[-1]))

    def mark(self, site: Site, tensor: Tensor) -> Tensor:
        """A tensor as it is behind a place where its layout may change."""
        with self.sleeping():
            alias = tensor.detach().view(tensor.shape)
            if site in self.parts:
                alias = alias.narrow(-3, 0, alias.shape[-3] // self.parts[site])
        self.node("mark", None, (tensor,), {}, alias, site)
        return alias

    def whole(self, op: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """run(*tensors) as one operator."""
        with self.sleeping():
            out = run(*tensors)
        self.node(op, run, tensors, {}, out)
        return out

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Nothing is written down."""
        self.asleep += 1
        try:
            yield
        finally:
            self.asleep -= 1


class _Dispatch(DispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.asleep:
            return func(*args, **kwargs)
        name = str(func._schema.name).rpartition("::")[2]
        if name == "addmm" and not kwargs:
            return _with_bias(recorder, args)
        mutable = name.endswith("_") and func._schema.is_mutable
        op = name[:-1] if mutable else name
        outs = args[0] if mutable and args[0].is_meta else shaped(op, args, kwargs)
        if outs is None:
            outs = func(*args, **kwargs)
        if mutable:
            recorder.index(args[0])
        recorder.node(op, func, args, kwargs, outs, changed=args[0] if mutable else None)
        return outs


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        op = None if recorder.asleep else COMPOSITE.get(func)
        if op is None:
            return func(*args, **kwargs)
        if op == "linear":
            return _linear(recorder, *args, **kwargs)
        if op == "scaled_dot_product_attention":
            if any(isinstance(x, Tensor) and not x.numel() for x in (*args, *kwargs.values())):
                # PyTorch 2.11 divides by the number of heads, which ends the process
                raise ValueError("attention of no heads")
            args, kwargs = with_mask(
                args, kwargs, lambda mask: recorder.mark((recorder.path[-1], MASK), mask)
            )
        with recorder.sleeping():
            outs = func(*args, **kwargs)
        recorder.node(op, func, args, kwargs, outs)
        return outs


def with_mask(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of scaled_dot_product_attention with their mask changed, if it has a part for
    each head, at dim -3."""
    named = dict(kwargs)
    mask = args[3] if len(args) > 3 else named.get("attn_mask")
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return args, named
    if len(args) > 3:
        return (*args[:3], change(mask), *args[4:]), named
    return args, named | {"attn_mask": change(mask)}


def _linear(
    recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """A linear layer as its product and the adding of its bias: between them a sum may come."""
    with recorder.sleeping():
        y = F.linear(input, weight)
    recorder.node("linear", F.linear, (input, weight), {}, y)
    return _biased(recorder, y, bias)


def _with_bias(recorder: Recorder, args: Any) -> Tensor:
    bias, a, b = args
    y = torch.ops.aten.mm.default(a, b)
    recorder.node("mm", torch.ops.aten.mm.default, (a, b), {}, y)
    return _biased(recorder, y, bias)


def _biased(recorder: Recorder, y: Tensor, bias: Tensor | None) -> Tensor:
    y = recorder.mark((recorder.path[-1], "product"), y)
    if bias is None:
        return y
    with recorder.sleeping():
        out = y.new_empty(y.shape) if y.is_meta else torch.add(y, bias)
    recorder.node("add", torch.ops.aten.add.Tensor, (y, bias), {}, out)
    return out


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    root: str = "",
    known: frozenset[str] = frozenset(),
    call: Callable[[Recorder], Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    parts: Mapping[Site, int] = MappingProxyType({}),
) -> Graph:
    """The operators of module(*args, **kwargs), or of `call` in its place.

    The module is on the meta device, or is one on which it costs little to run. root: the path of
    the module, before the names of all in it; known: paths of modules that are one node each, named
    "module". weights: tensors that take the place of parameters and buffers, by name, for a module
    that is not on the meta device; parts: sites of masks of which so many workers take a part each,
    by head. Hooks mark where modules begin and end while it runs.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    recorder = Recorder(own if weights is None else weights, parts)
    inputs = [t for t in tree_flatten((args, dict(kwargs or {})))[0] if isinstance(t, Tensor)]
    given = tuple(recorder.add(t, "the input") for t in inputs)
    with ExitStack() as stack, torch.no_grad():
        for path, part in module.named_modules():
            name = ".".join(word for word in (root, path) if word)
            _hook(stack, recorder, part, name, name in known)
        stack.enter_context(_Functions(recorder))
        stack.enter_context(_Dispatch(recorder))
        if call is not None:
            outs = call(recorder)
        elif weights is not None:
            outs = functional_call(module, dict(weights), args, dict(kwargs or {}))
        else:
            outs = module(*args, **(kwargs or {}))
    gave = tuple(recorder.index(t) for t in tree_flatten(outs)[0] if isinstance(t, Tensor))
    named = {".".join(w for w in (root, n) if w): i for n, i in recorder.parameters.items()}
    values, nodes = tuple(recorder.values), tuple(recorder.nodes)
    return Graph(values, nodes, given, gave, named)


def _hook(stack: ExitStack, recorder: Recorder, part: nn.Module, path: str, known: bool) -> None:
    """Mark the first tensor that a module takes and the first that it gives."""
    entered: list[Any] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder.path.append(path)
        args, kwargs = _first(args, kwargs, lambda t: recorder.mark((path, "input"), t))
        if known:
            entered.append((args, kwargs))
            recorder.asleep += 1
        return args, kwargs

    def after(_: nn.Module, args: Any, kwargs: Any, outs: Any) -> Any:
        if known:
            recorder.asleep -= 1
            given, named = entered.pop()
            weights = tuple(part.parameters())
            recorder.node("module", None, (given, named, weights), {}, outs)
        (outs,), _ = _first((outs,), {}, lambda t: recorder.mark((path, "output"), t))
        recorder.path.pop()
        return outs

    before_hook = part.register_forward_pre_hook(before, with_kwargs=True)
    after_hook = part.register_forward_hook(after, with_kwargs=True)
    stack.callback(before_hook.remove)
    stack.callback(after_hook.remove)


def _first(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """The arguments with their first tensor changed: the first floating one, if there is one."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    chosen = next((t for t in tensors if t.is_floating_point()), tensors[0] if tensors else None)
    if chosen is None:
        return args, kwargs
    new = change(chosen)
    changed: tuple[Any, Any] = tree_map_only(
        Tensor, lambda t: new if t is chosen else t, (args, kwargs)
    )
    return changed
