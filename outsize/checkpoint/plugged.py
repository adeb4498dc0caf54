"""Adapters of modules that nobody here wrote, in peft's layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from outsize.checkpoint import hub
from outsize.checkpoint.adapters import ADAPTER_CONFIG, BASE, GROUP, values_of
from outsize.checkpoint.files import read_header, read_json
from outsize.checkpoint.writing import write_json, write_tensors
from outsize.errors import OutsizeError
from outsize.models.declared import Declared, declarations
from outsize.models.names import Stored, in_files, joined
from outsize.models.plugged import (
    Named,
    Plugged,
    adapted,
    fits,
    plug,
    plugged_modules,
    record_of,
    unplug,
)
from outsize.models.targets import read


def save(model: nn.Module, path: str | Path) -> None:
    """Write the adapter of a module, as peft has it. OutsizeError for a module without one, and as
    of outsize.checkpoint.hub.save."""
    record = record_of(model)
    if record is None:
        raise OutsizeError("save: the model has no adapter; expected one of outsize.adapt")
    said = record.adapter.to_json(adapted(model))
    base: Any = getattr(model, "name_or_path", None)
    values = {
        one.theirs[0]: one.merge(tuple(model.get_parameter(n).detach() for n in one.ours))[0]
        for one in _entries(model)
    }

    def write(directory: Path) -> None:
        write_tensors(directory / f"{GROUP}.safetensors", GROUP, values)
        write_json(directory / ADAPTER_CONFIG, {**said, BASE: base or None})

    hub.whole_directory(Path(path), write)


def load(model: nn.Module, directory: Path) -> None:
    """Plug the adapter of a directory into a module. OutsizeError for a method that is not known,
    for tensors that are another's, and for an adapter that no weight of the module fits; the module
    is then as it was."""
    said = read_json(directory / ADAPTER_CONFIG)
    adapter = read(said, Named(model))
    if not fits(adapter):
        raise OutsizeError(
            f"{directory / ADAPTER_CONFIG}: peft_type is {said.get('peft_type')!r}, which changes"
            " more than layers and branches; expected an adapter of these"
        )
    header = read_header(directory / f"{GROUP}.safetensors")
    plug(model, adapter, seed=0)
    try:
        for name, write in values_of(header, _entries(model), model).items():
            write(model.get_parameter(name).data)
    except BaseException:
        unplug(model)
        raise


def _entries(model: nn.Module) -> tuple[Stored, ...]:
    """All stored tensors of what was plugged in."""
    each = list(_each(model))
    names = {
        name: in_files(one.file, partial(str, scope))
        for scope, name, one in each
        if one.file is not None
    }
    shapes = {name: model.get_parameter(name).shape for name in names}
    return joined(names, shapes, {name: one for _, name, one in each})


def _each(model: nn.Module) -> Iterator[tuple[str, str, Declared]]:
    """(what it belongs to in files, name, what is declared) of every parameter of an adapter."""
    for path, module, kind in plugged_modules(model):
        scope = path if kind is Plugged else f"{path}.{kind.slot}"
        for name, declared in declarations(module.get_submodule(kind.slot)):
            full = f"{path}.{kind.slot}.{name.removeprefix('.')}"
            yield scope, full.removeprefix("."), declared
