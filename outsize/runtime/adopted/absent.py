"""Values that this worker does not have: their shape and type are known, and where they come from.

Between the blocks of an adopted module its own code runs on every worker of a pipeline, also where
the blocks before it ran elsewhere. What it then computes of their outputs is absent too: operators
give shapes alone, and remember the sources. Whatever would need a value refuses, with its source's
name, so that no worker can go on with numbers that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.torch_private import (
    buffers_here,
    disable_current_modes,
    disabled_torch_function,
    make_wrapper_subclass,
    parameters_here,
    tree_leaves,
    tree_map,
)

aten = torch.ops.aten

# What these give depends on the shape of what they are given, and on no value.
_BY_SHAPE = frozenset(
    overload
    for packet in (
        aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like,
        aten.randn_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty,
        aten.new_empty_strided,
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
)  # fmt: skip
_INDEXED = frozenset(
    getattr(packet, name)
    for packet in (aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put)
    for name in packet.overloads()
)
_FUSED = aten._transformer_encoder_layer_fwd.default  # evaluation of torch's own; has no shapes


@dataclass(frozen=True, order=True)
class Source:
    """Where a value comes from: output `number` of the block of a segment, or (segment 0) the
    parameter of a name, or (segment -1) the `number`-th draw of random numbers."""

    segment: int
    number: int
    name: str

    def __str__(self) -> str:
        kind = {0: "parameter", -1: "random numbers drawn before"}.get(self.segment, "output of")
        return f"{kind} {self.name!r}"


class Origin:
    """Sources of a memory: views share it. read: some operator has looked at the values."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources, self.read = set(sources), False


class Absent(Tensor):
    """A tensor without values, on the device where they would be. PyTorch asks for a subclass."""

    form: Tensor  # on the meta device
    origin: Origin

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, origin: Origin) -> Absent:
        made: Absent = make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), storage_offset=form.storage_offset(),
            dtype=form.dtype, device=device, storage_size=0,
        )  # fmt: skip
        made.form, made.origin = form, origin
        return made

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {said(self.origin.sources)})"

    def tolist(self) -> Any:
        """Refused."""
        raise _refusal(self.origin.sources, "tolist")

    def numpy(self, *, force: bool = False) -> Any:
        """Refused."""
        raise _refusal(self.origin.sources, "numpy")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _BY_SHAPE:
            return func(*tree_map(_blank, args), **tree_map(_blank, named))
        found = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Absent)]
        device = torch.device(named.get("device") or found[0].device)
        if "device" in named:
            named["device"] = torch.device("meta")
        outs = _on_shapes(func, args, named, found)
        written = _written(func, args, named, found)
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        origin = _origin(func, found)
        return tree_map(lambda out: _absent(out, device, origin), outs)


def absent_like(tensor: Tensor, sources: Iterable[Source]) -> Absent:
    """A stand-in of a tensor's shape and type."""
    return Absent(form_of(tensor), tensor.device, Origin(sources))


def form_of(tensor: Tensor) -> Tensor:
    """A tensor's shape, strides and type, without memory; the same in a fake mode."""
    if isinstance(tensor, Absent):
        return tensor.form
    with disable_current_modes():
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )


def said(sources: Iterable[Source]) -> str:
    """Sources in words, three at most."""
    ordered = sorted(sources)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(map(str, ordered[:3])) + more


def _absent(out: Any, device: torch.device, origin: Origin) -> Any:
    return Absent(out, device, origin) if isinstance(out, Tensor) else out


def _blank(leaf: Any) -> Any:
    if not isinstance(leaf, Absent):
        return leaf
    return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _on_shapes(func: Any, args: Any, kwargs: Any, found: Sequence[Absent]) -> Any:
    if func is _FUSED:
        return torch.empty_like(found[0].form)
    if func in _INDEXED:
        args = (args[0], _places(args[1]), *args[2:])
    forms = tree_map(_form, args), tree_map(_form, kwargs)
    try:
        with disable_current_modes():
            return func(*forms[0], **forms[1])
    except RuntimeError:
        raise _refusal(set().union(*(x.origin.sources for x in found)), str(func)) from None


def _refusal(sources: Iterable[Source], what: str) -> OutsizeError:
    return OutsizeError(
        f"code around the blocks, or the loss, asks for values ({what}) of the {said(sources)},"
        " which another worker of the pipeline has; make it depend on shapes and on the batch"
        " alone, or put all workers on the data axis"
    )


def _form(leaf: Any) -> Any:
    return form_of(leaf) if isinstance(leaf, Tensor) else leaf


def _places(indices: Any) -> Any:
    """Indices with masks as the places where they are true: how many is known where the mask is."""
    flat: list[Any] = []
    for index in indices:
        mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        if mask and not isinstance(index, Absent):
            flat.extend(index.nonzero(as_tuple=True))
        else:
            flat.append(index)
    return flat


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operator writes into."""
    return tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any, found: Sequence[Absent]) -> list[Any]:
    """The arguments that are written, which depend on all others from now on."""
    where = _writes(func)
    into = [args[i] if i < len(args) else kwargs.get(name) for i, name in where]
    tensors = [leaf for leaf in tree_leaves(into) if isinstance(leaf, Tensor)]
    sources = set().union(*(x.origin.sources for x in found))
    for tensor in tensors:
        if not isinstance(tensor, Absent) or torch.Tag.inplace_view in func.tags:
            raise OutsizeError(
                f"code around the blocks changes a tensor in place ({func}) with the"
                f" {said(sources)}, which another worker of the pipeline has; compute a new tensor"
                " instead, or put all workers on the data axis"
            )
        tensor.origin.sources |= sources
    if tensors:
        for x in found:
            x.origin.read = True
    return into if tensors else []


def _origin(func: Any, found: Sequence[Absent]) -> Origin:
    if _is_view(func):
        return found[0].origin
    for x in found:
        x.origin.read = True
    return Origin(set().union(*(x.origin.sources for x in found)))


@contextmanager
def instead(places: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Put values into dictionaries (of a module's parameters or buffers), and back at the end."""
    places = list(places)
    before = [(home, name, home[name]) for home, name, _ in places]
    for home, name, value in places:
        home[name] = value
    try:
        yield
    finally:
        for home, name, value in before:
            home[name] = value


Place = tuple[dict[str, Any], str, Any]


def parameters_instead(model: nn.Module, of: Callable[[nn.Parameter], Any]) -> list[Place]:
    """For `instead`: what of(parameter) gives, everywhere in a module where it gives something."""
    return [
        (parameters_here(module), name, value)
        for module in model.modules()
        for name, parameter in parameters_here(module).items()
        if parameter is not None and (value := of(parameter)) is not None
    ]


def buffers_instead(model: nn.Module) -> list[Place]:
    """For `instead`: copies of a module's buffers, which may change in their place."""
    return [
        (buffers_here(module), name, buffer.clone())
        for module in model.modules()
        for name, buffer in buffers_here(module).items()
        if buffer is not None
    ]
