"""Adapters in peft's layout: adapter_config.json and adapter_model.safetensors in a directory.

The directory holds what is trained alone; the model that it is beside lies where the file says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.checkpoint import hub
from outsize.checkpoint.files import Header, read_header, read_json, read_tensor
from outsize.checkpoint.manifest import MANIFEST_NAME
from outsize.checkpoint.writing import write_json, write_tensors
from outsize.errors import OutsizeError
from outsize.models.attention import Attention
from outsize.models.build import attach, materialise, segments
from outsize.models.coding import SAID, asked, plain
from outsize.models.config import DecoderConfig
from outsize.models.declared import declarations
from outsize.models.decoder import Block, Decoder, Prologue
from outsize.models.linear import Linear
from outsize.models.mlp import MLP
from outsize.models.names import BESIDE, Stored, adapter_layout
from outsize.torch_private import meta_kernels

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
    adapters: Sequence[tuple[str | Path, float]] = (),
) -> Decoder:
    """The model in a Hugging Face directory, or that of an adapter's directory with the adapter
    beside it, in `dtype` (None: the model's own). config: where it is known already. adapters:
    directories of some, and what each counts; the weights take up what they change. OutsizeError
    as of outsize.checkpoint.hub.load, and for an adapter whose tensors are another's."""
    directory, config = Path(path), config or read_config(path)
    if adapters or config.adapter is not None:  # computed on shapes
        meta_kernels()
    if adapters:
        from outsize.checkpoint.combining import check_plain, combine

        check_plain(config)
        combine(merge(model := load(directory, dtype, device, config)), adapters)
        return model
    if config.adapter is None:
        return hub.load(directory, dtype, device, config=config)
    base = described(directory)[1]
    found = hub.describe(base, config)
    header = read_header(directory / f"{GROUP}.safetensors")
    written = values_of(header, adapter_layout(config), found.model)
    own = found.fill(dtype, device or "cpu")

    def fill(name: str, parameter: Tensor) -> Tensor:
        if name not in written:
            return own(name, parameter)
        to = found.model.prologue.tokens.weight.dtype  # read before: of the first segment
        out = torch.empty(parameter.shape, dtype=to, device=device or "cpu")
        return written[name](out)

    for segment, _ in segments(found.model):
        materialise(found.model, segment, fill)
    hub.check_tied_head(found.shards, config, lambda: found.model.prologue.tokens.weight)
    found.model.origin = directory if (directory / hub.CONFIG).is_file() else base
    found.model.words = tokenizer_directory(directory)
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
    from outsize.models.naming import OfDecoder
    from outsize.models.targets import read

    return replace(config, adapter=read(said, OfDecoder(config)))


def values_of(
    header: Header, stored: Sequence[Stored], model: nn.Module
) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name of each of an adapter's parameters, what writes its value from the file, and gives
    it. model: that has them. OutsizeError for a file of other tensors, or of other shapes."""
    _check_names(header, {entry.theirs[0] for entry in stored})
    _check_shapes(header, stored, dict(model.named_parameters()))

    def written(entry: Stored, place: int, out: Tensor) -> Tensor:
        if entry.unchanged:
            return read_tensor(header, entry.theirs[0], out)
        return out.copy_(entry.split((read_tensor(header, entry.theirs[0]),))[place])

    return {
        name: partial(written, entry, place)
        for entry in stored
        for place, name in enumerate(entry.ours)
    }


def _check_names(header: Header, wanted: Set[str]) -> None:
    """OutsizeError where an adapter's file has other tensors than a model wants of it."""
    lost, lacking = header.entries.keys() - wanted, wanted - header.entries.keys()
    if lost or lacking:
        raise OutsizeError(
            f"{header.path}: {len(lost)} of its {len(header.entries)} tensors were not used and"
            f" {len(lacking)} are missing, as {min(lost or lacking)!r}; expected the adapter that"
            f" its {ADAPTER_CONFIG} describes, of this model"
        )


def save(model: Decoder, path: str | Path, max_shard_bytes: int = hub.MAX_SHARD_BYTES) -> None:
    """Write a model: as a Hugging Face directory, or, of one with an adapter, the adapter alone as
    peft has it, and what codes the weights beside it are held as, if they are. OutsizeError as of
    outsize.checkpoint.hub.save."""
    if model.config.adapter is None:
        hub.save(model, path, max_shard_bytes)
        return
    config, values = model.config, dict(model.named_parameters())
    stored = {
        entry.theirs[0]: entry.merge(tuple(values[name].detach() for name in entry.ours))[0]
        for entry in adapter_layout(config)
    }

    def write(directory: Path) -> None:
        write_tensors(directory / f"{GROUP}.safetensors", GROUP, stored)
        write_json(directory / ADAPTER_CONFIG, to_json(config, base_of(model)))
        if config.coding is not None and not config.coding.stored:
            hub.write_config(directory, config, model.prologue.tokens.weight.dtype)
        hub.copy_words(model.words, directory)

    if model.taken_up:
        raise OutsizeError(
            "save: the weights beside the adapter have taken up another one, so they lie in no"
            " directory; save what outsize.merge gives, load it, and adapt that"
        )
    hub.check_values(model)
    hub.whole_directory(path, write)


def to_json(config: DecoderConfig, base: Path | None) -> dict[str, Any]:
    """What the adapter_config.json of a model says. base: the directory of its frozen weights."""
    from outsize.models import targets

    assert config.adapter is not None, "asked of a model that has one"
    said = config.adapter.to_json(targets.adapted(config))
    return {**said, BASE: None if base is None else str(base.resolve())}


def base_of(model: Decoder) -> Path | None:
    """The directory of a model's frozen weights, where they lie in one."""
    if model.taken_up:
        return None
    if model.origin is not None and (model.origin / ADAPTER_CONFIG).is_file():
        return described(model.origin)[1]
    return model.origin


@torch.no_grad()
def merge(model: Decoder) -> Decoder:
    """The plain model that computes what this one computes with its adapter: the same object, whose
    weights have taken up the change; it costs nothing more from then on. A model without an adapter
    stays as it is."""
    if model.config.adapter is None:
        return model
    coding = model.config.coding
    if coding is not None:
        raise OutsizeError(
            f"merge: the weights are {coding.format.name}, whose steps are coarser than what an"
            " adapter changes: rounded to them again, most of the change would be lost; merge what"
            " outsize.load(RUN, weights='plain') gives, or keep the adapter"
        )
    check_mergeable(model)
    for one in [module for module in model.modules() if isinstance(module, Linear)]:
        if one.beside is not None:
            wide = torch.promote_types(one.weight.dtype, torch.float32)
            one.weight.copy_(one.beside.merged(one.weight.to(wide)))
            if one.bias is not None:
                one.bias.copy_(one.beside.shift(one.bias))
    remove(model).taken_up = True
    return model


def mergeable(model: Decoder) -> bool:
    """Whether weights can take up its adapter."""
    mixed = any(isinstance(one, MLP) and one.mixture is not None for one in model.modules())
    return not mixed and all(BESIDE in n for n, one in declarations(model) if one.file)


def check_mergeable(model: Decoder) -> None:
    """OutsizeError for an adapter that no weight can take up."""
    if not mergeable(model):
        raise OutsizeError(
            "merge: the adapter computes what no weight of the model can take up; keep it beside"
            " the model: give its own directory to outsize generate, chat, eval or load, instead of"
            " the base's"
        )


def remove(model: Decoder) -> Decoder:
    """The same object without its adapter, its weights as they are: trained again are those that a
    plain model trains. A model without an adapter stays as it is."""
    if model.config.adapter is None:
        return model
    for one in model.modules():
        if isinstance(one, Linear):
            one.beside = None
        if isinstance(one, Block):
            one.attention_around = one.mlp_around = None
            one.seen = False
        if isinstance(one, Prologue | Attention):
            one.virtual = None
        if isinstance(one, MLP):
            one.mixture = None
    if not model.taken_up:
        model.origin = base_of(model)
    model.config = replace(model.config, adapter=None)
    del model.blocks[len(model.config.layers) :]
    with torch.device("meta"):
        without = Decoder(model.config)
    trained = {name: p.requires_grad for name, p in without.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    return model


def narrowed(model: Decoder, rank: int) -> Decoder:
    """The same object, whose adapter has the first components of each of its updates alone, as many
    as `rank`. OutsizeError for an adapter that has none, and for a rank above its own."""
    from outsize.models.adapter import Narrows

    adapter = model.config.adapter
    if not isinstance(adapter, Narrows):
        raise OutsizeError(
            f"rank is {rank}, and the model has no adapter of which a lower rank is a part;"
            " expected a plain low-rank one"
        )
    if not 1 <= rank <= adapter.rank:
        raise OutsizeError(f"rank is {rank}; expected 1 to {adapter.rank}, the adapter's own")
    values = {name: p.detach() for name, p in model.named_parameters() if ".beside." in name}

    def write(name: str, out: Tensor) -> None:
        out.copy_(values[name][tuple(map(slice, out.shape))])

    attach(remove(model), adapter.narrowed(rank), lambda: write)
    return model


def put(model: Decoder, path: str | Path) -> None:
    """Put the adapter of a directory beside a decoder that has none, in the dtype and on the device
    of its weights. OutsizeError for one that has an adapter, for an adapter of another model, and
    as of `load`."""
    directory = Path(path).expanduser()
    said = read_json(directory / ADAPTER_CONFIG)
    config = adapted(said, model.config)
    assert config.adapter is not None
    _check_base(model.config, said, directory)
    with torch.device("meta"):
        form = Decoder(config)
    header = read_header(directory / f"{GROUP}.safetensors")
    written = values_of(header, adapter_layout(config), form)

    def write(name: str, out: Tensor) -> None:
        written[name](out)

    attach(model, config.adapter, lambda: write)


def _check_base(config: DecoderConfig, said: Mapping[str, Any], directory: Path) -> None:
    """OutsizeError where the model that an adapter names is here, and is another."""
    base = Path(str(said.get(BASE))).expanduser()
    coded = config.coding is not None and not config.coding.stored
    wanted = plain(config) if coded else config
    if (base / hub.CONFIG).is_file() and hub.read_config(base) != wanted:
        raise OutsizeError(
            f"{directory}: the adapter is of {base}, whose config.json is not this model's;"
            " expected an adapter of this one"
        )


def _check_shapes(header: Header, stored: Sequence[Stored], own: Mapping[str, Tensor]) -> None:
    """OutsizeError for a tensor of another shape than the model's adapter has."""
    for entry in stored:
        (wanted,) = (tuple(x.shape) for x in entry.merge(tuple(own[n] for n in entry.ours)))
        if (found := tuple(header.entries[entry.theirs[0]].shape)) != wanted:
            raise OutsizeError(
                f"{header.path}: tensor {entry.theirs[0]!r} has shape {found}; expected {wanted},"
                " as this model's weights have it"
            )


def model_directory(path: str | Path) -> Path:
    """The Hugging Face directory at `path`, or in the latest checkpoint of the run at `path`, or
    what a GGUF file there unpacks to.

    A checkpoint is verified, every byte of it. OutsizeError for what is neither, or damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutsizeError(f"directory is {path!r}; expected the path of a run or a model")
    directory = Path(path).expanduser()
    if directory.is_file() and directory.suffix == ".gguf":
        from outsize.checkpoint.gguf_model import directory_of

        return directory_of(directory)
    if not directory.is_dir():
        raise OutsizeError(
            f"{directory} is not a directory; expected a run, a checkpoint, a Hugging Face model or"
            " a .gguf file"
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
