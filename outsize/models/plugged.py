"""Adapters in a module that nobody here wrote: plugged into it by paths, and taken out again.

Hu et al., "OpenDelta: A Plug-and-play Library for Parameter-efficient Adaptation of Pre-trained
Models", 2023. Linear layers, and branches as modules that have such layers, are named by their
paths. A module stays the object that it is and its weights are not touched: its class becomes a
subclass of its own with another forward, and what is beside or around it is a submodule, which
whoever trains, copies or saves the whole finds like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import Adapted, Adapter, Begins, Beside, Changes, Wraps
from outsize.models.around import Surrounds, placed
from outsize.models.build import write_initial
from outsize.models.declared import Unit, declarations
from outsize.models.naming import selected
from outsize.models.targets import chosen, freeze

_RECORD, _CONV1D = "_outsize_adapter", "Conv1D"


@dataclass(frozen=True)
class Seen:
    """A linear layer of torch's, or Conv1D of transformers', as what is beside it sees it."""

    layer: nn.Module
    use: str = "plain"
    unit: Unit | None = None

    @property
    def transposed(self) -> bool:
        return any(one.__name__ == _CONV1D for one in type(self.layer).__mro__)

    @property
    def sizes(self) -> tuple[int, int]:
        d_out, d_in = self.matrix().shape
        return d_out, d_in

    def matrix(self) -> Tensor:
        weight = self.layer.get_parameter("weight")
        return weight.t() if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        bias = self.layer.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix())


@dataclass(frozen=True)
class Record:
    """What was done to a module. trained: the names of its parameters that were trained before."""

    adapter: Adapter
    trained: frozenset[str]


def record_of(model: nn.Module) -> Record | None:
    """Of a module that has an adapter plugged in, else None."""
    found = model.__dict__.get(_RECORD)
    assert found is None or isinstance(found, Record)
    return found


def fits(adapter: Adapter) -> bool:
    """Whether an adapter can be plugged into modules that nobody here wrote."""
    return isinstance(adapter, Changes | Surrounds | Wraps)


def plug(model: nn.Module, adapter: Adapter, seed: int) -> None:
    """Freeze a module and put an adapter into it, with initial values in the dtype and where the
    weights are. OutsizeError as of `chosen` and `placed`, with the module as it was, and
    for one that has an adapter already."""
    if record_of(model) is not None:
        raise OutsizeError("adapt: the model has an adapter already; remove or merge that before")
    layers, found = dict(linear_layers(model)), list[tuple[str, nn.Module, Kind]]()
    if isinstance(adapter, Changes):
        for _, path, beside in chosen(adapter.parts, layers, lambda name: name):
            assert isinstance(beside, nn.Module), "what has parameters is a module"
            found.append((path, beside, Plugged))
    if isinstance(adapter, Surrounds):
        every = placed(adapter.places, _branches(model))
        found += [(path, own, Plugged if path in layers else Surrounded) for path, own in every]
    if isinstance(adapter, Wraps):
        found += [(path, own, Wrapped) for path, own in adapter.wrapping(model).items()]
    for path, *_ in found:
        _check_called(model, path)
    trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    freeze(model)
    for path, own, kind in found:
        module = model.get_submodule(path)
        weight = layers[path].matrix() if path in layers else next(module.parameters())
        _begin(own, weight.detach(), f"{path}.{kind.slot}", seed)
        module.add_module(kind.slot, own)
        module.__class__ = _subclass(type(module), kind)
        if any(path.startswith(f"{one}." if one else "") for one in _encoders(model)):
            module.register_forward_hook(_as_it_is)
    model.__dict__[_RECORD] = Record(adapter, trained)


def unplug(model: nn.Module) -> None:
    """Take the adapter out: classes, submodules, and what is trained are as they were."""
    record = record_of(model)
    assert record is not None, "asked of a module that has one"
    for _, module, kind in plugged_modules(model):
        del module._modules[kind.slot]
        module.__class__ = type(module).__mro__[1]
        for key in [key for key, hook in module._forward_hooks.items() if hook is _as_it_is]:
            del module._forward_hooks[key]
    del model.__dict__[_RECORD]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in record.trained)


def _check_called(model: nn.Module, path: str) -> None:
    """OutsizeError for a module that is called past the forward of its class."""
    if "forward" in (module := model.get_submodule(path)).__dict__:
        raise OutsizeError(
            f"adapt: {path or 'the model'} has a forward of its own, beside that of its class"
            f" {type(module).__name__}, as accelerate's device_map sets it, and would never ask an"
            " adapter; load the model without device_map, or name other modules"
        )


def _encoders(model: nn.Module) -> list[str]:
    """By path torch's encoder layers. In evaluation they multiply by the weights of their linear
    layers themselves, unless one of these has a hook."""
    return [p for p, one in model.named_modules() if isinstance(one, nn.TransformerEncoderLayer)]


def _as_it_is(module: nn.Module, args: Any, y: Any) -> None:
    """A hook that changes nothing."""


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Have the weights take up what the adapter changes, and take it out. OutsizeError for one that
    computes what no weight can take up."""
    if any(kind is not Plugged for *_, kind in plugged_modules(model)):
        raise OutsizeError(
            "merge: the adapter computes what no weight of the model can take up; keep it, or take"
            " it out (outsize.remove_adapter)"
        )
    _check_unshared(model)
    for _, layer, beside in plugged_layers(model):
        seen, weight = Seen(layer), Seen(layer).matrix()
        weight.copy_(beside.merged(weight.to(torch.promote_types(weight.dtype, torch.float32))))
        if seen.bias is not None:
            seen.bias.copy_(beside.shift(seen.bias))
    unplug(model)


def _check_unshared(model: nn.Module) -> None:
    """OutsizeError where a weight or bias that would take something up is another module's too."""
    owners = dict[int, list[str]]()
    for path, module in model.named_modules():
        for own in module.parameters(recurse=False):
            owners.setdefault(id(own), []).append(path)
    for path, layer, _ in plugged_layers(model):
        for own in layer.parameters(recurse=False):
            other = next((one for one in owners[id(own)] if one != path), None)
            if other is not None:
                raise OutsizeError(
                    f"merge: {path} shares a weight with {other}, which would compute otherwise"
                    " then; keep the adapter, or adapt other layers (targets)"
                )


def plugged_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Beside]]:
    """(path, layer, what is beside it) of the layers that an adapter changes."""
    for path, layer, kind in plugged_modules(model):
        if kind is Plugged:
            beside: Any = layer._modules[kind.slot]
            yield path, layer, beside


def plugged_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Kind]]:
    """(path, module, how it is changed) of what an adapter was plugged into."""
    for path, module in list(model.named_modules()):
        for kind in (Plugged, Surrounded, Wrapped):
            if issubclass(type(module), kind):
                yield path, module, kind


def _branches(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By path, d_in and d_out of every part of a module that has linear layers: those of the first
    and of the last one. Where that is not what it takes and gives, it says so when it is called."""
    layers, found = dict(linear_layers(model)), dict[str, tuple[int, int]]()
    for path, _ in model.named_modules():
        inside = [one.sizes for name, one in layers.items() if name.startswith(f"{path}.")]
        if path and inside:
            found[path] = inside[0][1], inside[-1][0]
    return found


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Seen]]:
    """The linear layers of a module by path, its own output head left out. A layer of a class that
    adds to torch's is none: its forward may be another, or never called; nor is one whose weight is
    no parameter, but made of others (torch.nn.utils.weight_norm)."""
    head = _head(model)
    for path, layer in model.named_modules():
        kind = type(layer)
        plain = kind is nn.Linear or (kind.__name__ == _CONV1D and hasattr(layer, "nf"))
        weight = layer._parameters.get("weight")
        if plain and layer is not head and weight is not None and weight.is_floating_point():
            yield path, Seen(layer)


def _head(model: Any) -> object:
    """What a class of transformers says is its output head."""
    found = getattr(model, "get_output_embeddings", None)
    return found() if callable(found) else None


def adapted(model: nn.Module) -> Adapted:
    """What the adapter of a module changes, by the layers' paths."""
    layers = list(plugged_layers(model))
    transposed = any(Seen(layer).transposed for _, layer, _ in layers)
    found = {path: beside for path, _, beside in layers}
    return Adapted(found, {path: path for path in found}, transposed, paths=True)


@dataclass(frozen=True)
class Named:
    """The Naming of a module: by paths."""

    model: nn.Module

    def __call__(self, said: Mapping[str, Any]) -> tuple[str, ...]:
        return self.targets(self.chosen(said, "target_modules"))

    def chosen(self, said: Mapping[str, Any], key: str) -> Sequence[str]:
        names = {path: path for path, _ in linear_layers(self.model)}
        what = f"linear layer of a {type(self.model).__name__}; expected an adapter of such a model"
        return selected(said, key, names, what)

    def targets(self, names: Collection[str]) -> tuple[str, ...]:
        return tuple(names)

    def called(self, name: str) -> str:
        return name


class Plugged:
    """What linear layers with something beside them are, beside their own class."""

    slot = "beside"
    beside: Any
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self, nn.Module)
        y: Tensor = self.beside(Seen(self), x)
        return y if self.bias is None else y + self.beside.shift(self.bias)


class Surrounded:
    """What branches with something around them are, beside their own class: they take a tensor
    first, by place or by name, and give one, alone or first of several."""

    slot = "around"
    around: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = type(self).__mro__[1]
        given = own.forward(self, *args, **kwargs)
        taken = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        several = isinstance(given, tuple) and given
        y = given[0] if several else given
        want = tuple(self.around.sizes)
        got = tuple(x.shape[-1] if isinstance(x, Tensor) else None for x in (taken, y))
        if got != want:
            raise OutsizeError(
                f"adapt: a {own.__name__} takes and gives {got} features; expected {want}, as its"
                " first and its last linear layer: name other branches"
            )
        y = self.around(taken, y)
        return (y, *given[1:]) if several else y


class Wrapped:
    """What blocks that compute as an adapter says are, beside their own class."""

    slot = "wrapped"
    wrapped: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(self, *args, **kwargs)


Kind = type[Plugged | Surrounded | Wrapped]


def _subclass(own: type[nn.Module], kind: Kind) -> type[nn.Module]:
    body: dict[str, Any] = {"forward": kind.forward, "__module__": own.__module__}
    if issubclass(own, nn.Sequential):
        body["__iter__"] = _own_steps
    return type(own.__name__, (own, kind), body)


def _own_steps(steps: Any) -> Iterator[nn.Module]:
    """The modules that a Sequential calls one after the other, without what was plugged in."""
    return (module for name, module in steps._modules.items() if name != steps.slot)


def _begin(beside: nn.Module, weight: Tensor, path: str, seed: int) -> None:
    """Give what was made for a module with such a weight its initial values, drawn by the names
    that it will have."""
    begun = dict(beside.begin(weight)) if isinstance(beside, Begins) else {}
    for name, declared in list(declarations(beside)):
        name = name.removeprefix(".")
        old = beside.get_parameter(name)
        value = torch.empty(old.shape, dtype=weight.dtype, device=weight.device)
        if name in begun:
            value.copy_(begun[name])
        elif not value.is_meta:
            write_initial(declared.initial, value, seed, f"{path}.{name}")
        owner, _, leaf = name.rpartition(".")
        own = nn.Parameter(value, requires_grad=old.requires_grad)
        beside.get_submodule(owner).register_parameter(leaf, own)
