"""Adapters in peft's layout: adapter_config.json and adapter_model.safetensors in a directory.

The directory holds what is trained alone; the model that it is beside lies where the file says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint import hub
from outsize.checkpoint.files import Header, read_header, read_json, read_tensor
from outsize.checkpoint.manifest import MANIFEST_NAME
from outsize.checkpoint.writing import write_json, write_tensors
from outsize.errors import OutsizeError
from outsize.models.build import materialise, segments
from outsize.models.coding import SAID, asked
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.linear import Linear
from outsize.models.names import adapter_layout

ADAPTER_CONFIG = "adapter_config.json"
GROUP = "adapter_model"  # of a checkpoint's tensors; the stem of their file
BASE = "base_model_name_or_path"


def read_config(path: str | Path) -> DecoderConfig:
    """The model in a directory, with the adapter that is beside it, if there is one. OutsizeError
    as of outsize.checkpoint.hub.read_config, and for an adapter whose model is not there."""
    directory = Path(path)
    if not (directory / ADAPTER_CONFIG).is_file():
        return hub.read_config(directory)
    said, base = described(directory)
    return adapted(said, held(directory, hub.read_config(base)))


def held(directory: Path, config: DecoderConfig) -> DecoderConfig:
    """The model beside which an adapter was trained, as it was held then."""
    if not (directory / hub.CONFIG).is_file():
        return config
    return asked(config, read_json(directory / hub.CONFIG).get(SAID), f"{hub.CONFIG}: {SAID}")


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    config: DecoderConfig | None = None,
) -> Decoder:
    """The model in a Hugging Face directory, or that of an adapter's directory with the adapter
    beside it, in `dtype` (None: the model's own). config: where it is known already. OutsizeError
    as of outsize.checkpoint.hub.load, and for an adapter whose tensors are another's."""
    directory, config = Path(path), config or read_config(path)
    if config.adapter is None:
        return hub.load(directory, dtype, device, config=config)
    base = described(directory)[1]
    found = hub.describe(base, config)
    header = read_header(directory / f"{GROUP}.safetensors")
    names = _names(header, config)
    own = found.fill(dtype, device or "cpu")

    def fill(name: str, parameter: Tensor) -> Tensor:
        if name not in names:
            return own(name, parameter)
        to = found.model.prologue.tokens.weight.dtype  # read before: of the first segment
        out = torch.empty(parameter.shape, dtype=to, device=device or "cpu")
        return read_tensor(header, names[name], out)

    for segment, _ in segments(found.model):
        materialise(found.model, segment, fill)
    tokens = found.model.prologue.tokens
    hub.check_tied_head(found.shards, config, lambda: tokens.weight)
    found.model.origin = directory if (directory / hub.CONFIG).is_file() else base
    return found.model


def described(directory: Path) -> tuple[Mapping[str, Any], Path]:
    """What an adapter_config.json says, and the directory of its model."""
    said = read_json(directory / ADAPTER_CONFIG)
    base = said.get(BASE)
    if not isinstance(base, str) or not Path(base).expanduser().is_dir():
        raise OutsizeError(
            f"{directory / ADAPTER_CONFIG}: {BASE} is {base!r}, which is no directory here;"
            " expected that of the model: download it and set its path there"
        )
    return said, Path(base).expanduser()


def tokenizer_directory(directory: Path) -> Path:
    """Where the tokenizer of a model lies: with it, or with the model that an adapter is beside."""
    if (directory / "tokenizer.json").is_file() or not (directory / ADAPTER_CONFIG).is_file():
        return directory
    return described(directory)[1]


def adapted(said: Mapping[str, Any], config: DecoderConfig) -> DecoderConfig:
    """The config of a model with the adapter that an adapter_config.json says."""
    from outsize.models.adapter import FORMATS

    kind = str(said.get("peft_type"))
    if FORMATS.find(kind) is None:
        raise OutsizeError(
            f"{ADAPTER_CONFIG}: peft_type is {said.get('peft_type')!r}; expected one of"
            f" {', '.join(FORMATS.names())}"
        )
    return replace(config, adapter=FORMATS.get(kind)(said, config))


def _names(header: Header, config: DecoderConfig) -> dict[str, str]:
    """The name in the file of each of the adapter's parameters."""
    names = {entry.ours[0]: entry.theirs[0] for entry in adapter_layout(config)}
    for name in sorted(set(names.values()) ^ set(header.entries)):
        what = "lacks" if name not in header.entries else "has an unexpected"
        raise OutsizeError(
            f"{header.path} {what} tensor {name!r}; expected the adapter that its"
            f" {ADAPTER_CONFIG} describes"
        )
    return names


def save(model: Decoder, path: str | Path, max_shard_bytes: int = hub.MAX_SHARD_BYTES) -> None:
    """Write a model: as a Hugging Face directory, or, of one with an adapter, the adapter alone as
    peft has it. OutsizeError as of outsize.checkpoint.hub.save."""
    if model.config.adapter is None:
        hub.save(model, path, max_shard_bytes)
        return
    config, values = model.config, dict(model.named_parameters())
    stored = {entry.theirs[0]: values[entry.ours[0]] for entry in adapter_layout(config)}

    def write(directory: Path) -> None:
        write_tensors(directory / f"{GROUP}.safetensors", GROUP, stored)
        write_json(directory / ADAPTER_CONFIG, to_json(config, base_of(model)))

    hub.check_values(model)
    hub.whole_directory(path, write)


def to_json(config: DecoderConfig, base: Path | None) -> dict[str, Any]:
    """What the adapter_config.json of a model says. base: the directory of its frozen weights."""
    assert config.adapter is not None, "asked of a model that has one"
    return {**config.adapter.to_json(config), BASE: None if base is None else str(base.resolve())}


def base_of(model: Decoder) -> Path | None:
    """The directory of a model's frozen weights, where it was loaded."""
    if model.origin is not None and (model.origin / ADAPTER_CONFIG).is_file():
        return described(model.origin)[1]
    return model.origin


@torch.no_grad()
def merge(model: Decoder) -> Decoder:
    """The plain model that computes what this one computes with its adapter: the same object, whose
    weights have taken up the change; it costs nothing more from then on. A model without an adapter
    stays as it is."""
    coding = model.config.coding
    if coding is not None and model.config.adapter is not None:
        raise OutsizeError(
            f"merge: the weights are {coding.format.name}, whose steps are coarser than what an"
            " adapter changes: rounded to them again, most of the change would be lost; merge what"
            " outsize.load(RUN, weights='plain') gives, or keep the adapter"
        )
    for one in [module for module in model.modules() if isinstance(module, Linear)]:
        if one.beside is not None:
            wide = torch.promote_types(one.weight.dtype, torch.float32)
            one.weight.copy_(one.beside.merged(one.weight.to(wide)))
            if one.bias is not None:
                one.bias.copy_(one.beside.shift(one.bias))
            one.beside = None
    if model.config.adapter is not None:
        model.origin = base_of(model)
        model.config = replace(model.config, adapter=None)
        with torch.device("meta"):
            plain = Decoder(model.config)
        trained = {name: p.requires_grad for name, p in plain.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    return model


def model_directory(path: str | Path) -> Path:
    """The Hugging Face directory at `path`, or in the latest checkpoint of the run at `path`.

    A checkpoint is verified, every byte of it. OutsizeError for what is neither, or damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutsizeError(f"directory is {path!r}; expected the path of a run or a model")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise OutsizeError(
            f"{directory} is not a directory; expected a run, a checkpoint or a Hugging Face model"
        )
    if (directory / MANIFEST_NAME).is_file():
        from outsize.checkpoint.opened import open_contents

        open_contents(directory).verify()
        return directory
    if any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return directory
    from outsize.checkpoint.store import Store

    store = Store(directory)
    if store.latest() is None:
        raise OutsizeError(
            f"{directory} holds no model: neither a config.json nor a checkpoint; expected a run, a"
            " checkpoint or a Hugging Face model"
        )
    checkpoint = store.load()
    checkpoint.verify()
    return checkpoint.path
