"""Adapters in a module that nobody here wrote: plugged into its linear layers, and taken out again.

Hu et al., "OpenDelta: A Plug-and-play Library for Parameter-efficient Adaptation of Pre-trained
Models", 2023. Layers are named by their paths. A layer stays the object that it is and its weight
is not touched: its class becomes a subclass of its own with another forward, and what is beside it
is a submodule, which whoever trains, copies or saves the module finds like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import Adapted, Begins, Beside, Changes
from outsize.models.build import write_initial
from outsize.models.declared import Unit, declarations
from outsize.models.targets import ALL, chosen, named

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

    adapter: Changes
    trained: frozenset[str]


def record_of(model: nn.Module) -> Record | None:
    """Of a module that has an adapter plugged in, else None."""
    found = model.__dict__.get(_RECORD)
    assert found is None or isinstance(found, Record)
    return found


def plug(model: nn.Module, adapter: Changes, seed: int) -> None:
    """Freeze a module and put an adapter beside its linear layers, with initial values in the dtype
    and on the device of each layer's weight. OutsizeError as of `chosen`, with the module as it
    was, and for one that has an adapter already."""
    if record_of(model) is not None:
        raise OutsizeError("adapt: the model has an adapter already; remove or merge that before")
    layers = dict(linear_layers(model))
    found = [(n, beside) for _, n, beside in chosen(adapter.parts, layers, lambda name: name)]
    trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path, beside in found:
        assert isinstance(beside, nn.Module), "what has parameters is a module"
        layer = layers[path].layer
        _begin(beside, layers[path], f"{path}.beside", seed)
        layer.add_module("beside", beside)
        layer.__class__ = _plugged(type(layer))
    model.__dict__[_RECORD] = Record(adapter, trained)


def unplug(model: nn.Module) -> None:
    """Take the adapter out: classes, submodules, and what is trained are as they were."""
    record = record_of(model)
    assert record is not None, "asked of a module that has one"
    for _, layer, _ in plugged_layers(model):
        del layer._modules["beside"]
        layer.__class__ = type(layer).__mro__[1]
    del model.__dict__[_RECORD]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in record.trained)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Have the weights take up what the adapter changes, and take it out."""
    for _, layer, beside in plugged_layers(model):
        seen, weight = Seen(layer), Seen(layer).matrix()
        weight.copy_(beside.merged(weight.to(torch.promote_types(weight.dtype, torch.float32))))
        if seen.bias is not None:
            seen.bias.copy_(beside.shift(seen.bias))
    unplug(model)


def plugged_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Beside]]:
    """(path, layer, what is beside it) of the layers that an adapter changes."""
    for path, layer in list(model.named_modules()):
        if issubclass(type(layer), Plugged):
            beside: Any = layer._modules["beside"]
            yield path, layer, beside


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Seen]]:
    """The linear layers of a module by path, its own output head left out. A layer of a class that
    adds to torch's is none: its forward may be another, or never called."""
    head = _head(model)
    for path, layer in model.named_modules():
        kind = type(layer)
        plain = kind is nn.Linear or (kind.__name__ == _CONV1D and hasattr(layer, "nf"))
        if plain and layer is not head and layer.weight.is_floating_point():
            yield path, Seen(layer)


def _head(model: Any) -> object:
    """What a class of transformers says is its output head."""
    found = getattr(model, "get_output_embeddings", None)
    return found() if callable(found) else None


def adapted(model: nn.Module) -> Adapted:
    """What the adapter of a module changes, by the layers' paths."""
    layers = list(plugged_layers(model))
    transposed = any(Seen(layer).transposed for _, layer, _ in layers)
    return Adapted({path: beside for path, _, beside in layers}, transposed)


def targets_of(model: nn.Module, said: object, key: str = "target_modules") -> tuple[str, ...]:
    """The Naming of a module. OutsizeError where none of its linear layers is named."""
    found = tuple(path for path, _ in linear_layers(model) if named(path, said))
    if not found:
        raise OutsizeError(
            f"adapter_config.json: {key} is {said!r}, which names no linear layer of a"
            f" {type(model).__name__}; expected an adapter of such a model"
        )
    return (ALL,) if said == ALL else found


class Plugged:
    """What linear layers with something beside them are, beside their own class."""

    beside: Any
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self, nn.Module)
        y: Tensor = self.beside(Seen(self), x)
        return y if self.bias is None else y + self.beside.shift(self.bias)


def _plugged(own: type[nn.Module]) -> type[nn.Module]:
    body = {"forward": Plugged.forward, "__module__": own.__module__}
    return type(own.__name__, (own, Plugged), body)


def _begin(beside: nn.Module, seen: Seen, path: str, seed: int) -> None:
    """Give what is beside a layer its initial values, drawn by the names that it will have."""
    weight = seen.matrix().detach()
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
