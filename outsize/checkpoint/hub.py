"""Hugging Face directories: config.json and safetensors in, and the same out again.

Loading goes segment by segment: every name and shape is checked against the headers first, then
each parameter is read straight to where it stays, so that the peak is the model plus one block.
Saving goes tensor by tensor into a directory that gets its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from outsize.checkpoint.contents import WEIGHTS, merged, write_groups
from outsize.checkpoint.files import Entry, Header, read_json
from outsize.checkpoint.shards import SINGLE, SUMS, Shards, open_shards, sums_json
from outsize.checkpoint.writing import scratch, sync_directory, write_json
from outsize.errors import OutsizeError
from outsize.models.build import Fill, build, materialise, rest, segments
from outsize.models.coding import as_stored
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.names import Stored, alternatives, ignorable, layout

CONFIG = "config.json"
TOKENS = "prologue.tokens.weight"
MAX_SHARD_BYTES = 5 << 30
WORDS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)  # the files of a tokenizer, and of what ends a text
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # not quantised
_SPELLED = ", ".join(map(str, WEIGHT_DTYPES))


def read_config(path: str | Path) -> DecoderConfig:
    """The model described by the config.json in a directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise OutsizeError(f"{directory} is not a directory: expected one with a {CONFIG}")
    if not (directory / CONFIG).is_file():
        raise OutsizeError(
            f"{directory} has no {CONFIG}; expected the directory of a model, or a checkpoint"
        )
    source = read_json(directory / CONFIG)
    try:
        return parse(source)
    except OutsizeError as error:
        raise OutsizeError(f"{directory}: {error}") from error


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: Literal["required", "random"] = "required",
    seed: int = 0,
    config: DecoderConfig | None = None,
) -> Decoder:
    """The model in a Hugging Face directory, in `dtype` (None: that of the files) on `device`.

    weights="random" takes the config.json only and draws initial values from `seed` (dtype None:
    the config's). Peak memory is the model and one block. OutsizeError, naming file and tensor,
    for an unknown family and for weights that are missing, unexpected, misshapen or damaged.
    """
    check_dtype(dtype)
    config = config or read_config(path)
    device = device or "cpu"
    if weights == "random":
        return build(config, seed, dtype or _config_dtype(config), device)
    if weights != "required":
        raise OutsizeError(f"weights = {weights!r}, expected 'required' or 'random'")
    found = describe(path, config)
    model, fill = found.model, found.fill(dtype, device)
    for segment, _ in segments(model):
        materialise(model, segment, fill)
    check_tied_head(found.shards, config, lambda: model.prologue.tokens.weight)
    return model


@dataclass(frozen=True)
class Described:
    """A Hugging Face directory whose weights are known but not read.

    model: on the meta device. names: the name in the files of each stored tensor, by its usual one.
    changed: what a parameter is, from its name and what the files hold; None: that.
    """

    model: Decoder
    shards: Shards
    names: Mapping[str, str]
    stored: tuple[Stored, ...]
    changed: Fill | None = None

    def entry(self, name: str) -> tuple[Path, Entry]:
        """The file and the span of a stored tensor, by its usual name."""
        return self.shards.where[self.names[name]].path, self.shards.entry(self.names[name])

    def dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """What each parameter of a model in `dtype` (None: that of the files) rests in.
        OutsizeError for a dtype that weights do not have."""
        check_dtype(dtype)
        return {
            name: rest(name, dtype or self.entry(entry.theirs[0])[1].dtype)
            for entry in self.stored
            for name in entry.ours
        }

    def fill(self, dtype: torch.dtype | None, device: torch.device | str = "cpu") -> Fill:
        """Reads parameters, for `materialise`. The parts of a group are asked for together."""
        read, changed = _reader(self.shards, self.names, self.stored, dtype, device), self.changed
        if changed is None:
            return read
        return lambda name, parameter: changed(name, read(name, parameter))


def describe(path: str | Path, config: DecoderConfig | None = None) -> Described:
    """What a directory holds: every header, name, shape and dtype is checked, no weight is read.

    config: where it is known already. OutsizeError as of `load`.
    """
    config = config or read_config(path)
    shards = open_shards(Path(path))
    model = build(config)
    model.origin = model.words = Path(path)
    stored = layout(config)
    names = _match(shards, config, stored)
    _check(shards, names, model, stored)
    return Described(model, shards, names, stored)


def supposed(config: DecoderConfig) -> Described:
    """What `describe` would say of a model, in its config's dtype, that had been saved."""
    model, stored = build(config, dtype=_config_dtype(config)), layout(config)
    values, entries, start = dict(model.named_parameters()), dict[str, Entry](), 0
    for name, x in merged(stored, values.__getitem__, values.__getitem__):
        stop = start + prod(x.shape) * x.dtype.itemsize
        entries[name] = Entry(name, x.dtype, x.shape, start, stop)
        start = stop
    header = Header(Path(SINGLE), entries, {}, start, 0)
    shards = Shards(Path(), dict.fromkeys(entries, header), {})
    return Described(model, shards, {name: name for name in entries}, stored)


def save(model: Decoder, path: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `model` as a Hugging Face directory, with checksums in outsize.json beside it, and the
    tokenizer that it was loaded with.

    Peak memory beside the model is a few tensors of one block. The directory appears complete or
    not at all. OutsizeError for one that exists and is not empty, and where the system refuses.
    """
    if max_shard_bytes <= 0:
        raise OutsizeError(f"max_shard_bytes = {max_shard_bytes}, expected a positive number")
    if model.config.adapter is not None:
        raise OutsizeError(
            "model: it has an adapter, and a Hugging Face directory holds plain models; merge it"
            " before (outsize.merge), or save the adapter"
        )
    check_values(model)

    def files(directory: Path) -> None:
        write(model, directory, max_shard_bytes)
        copy_words(model.words, directory)

    whole_directory(path, files)


def check_here(model: Decoder) -> None:
    """Refuse a model whose weights are in files or on several workers, as `load` was asked."""
    if model.away:
        raise OutsizeError(
            f"model: it was loaded with {model.away}, and its weights are not all in memory here;"
            f" load it without {model.away} to train, change or save it"
        )


def check_values(model: Decoder) -> None:
    """Refuse a model of which some parameter is a shape alone, or rests elsewhere."""
    check_here(model)
    absent = next((name for name, x in model.named_parameters() if x.is_meta), None)
    if absent is not None:
        raise OutsizeError(f"parameter {absent} has no value yet (it is on the meta device)")


def copy_words(words: Path | None, directory: Path) -> None:
    """Copy the tokenizer's files of a directory (None: of nowhere), as many as it has. OSError
    that names the file at fault."""
    for name in WORDS:
        if words is not None and (words / name).is_file():
            try:
                shutil.copyfile(words / name, directory / name)
            except OSError as error:  # of two files shutil names the one that is read first
                fault = error.filename2 or error.filename
                raise OSError(error.errno, error.strerror, fault) from error


def check_new(path: str | Path) -> None:
    """OutsizeError for a directory that exists and is not empty, and for a file."""
    final = Path(path).resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise OutsizeError(f"{final} exists already: save to a new directory, or empty it first")


def whole_directory(path: str | Path, write: Callable[[Path], None]) -> None:
    """Make a directory of what `write` puts there: complete, or not at all. OutsizeError for one
    that exists and is not empty, and where the system refuses."""
    final = Path(path).resolve()
    try:
        check_new(final)
        with scratch(final) as part:
            write(part)
            sync_directory(part)
            os.rename(part, final)  # refuses a directory that is not empty
        sync_directory(final.parent)
    except OSError as error:
        raise OutsizeError(f"cannot save to {final}: {error.strerror}") from error


# Loading


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse one that weights do not have."""
    if dtype not in (None, *WEIGHT_DTYPES):
        raise OutsizeError(f"dtype = {dtype!r}, expected None or one of {_SPELLED}")


def _config_dtype(config: DecoderConfig) -> torch.dtype:
    name = config.source.get("dtype", config.source.get("torch_dtype"))
    return {str(dtype): dtype for dtype in WEIGHT_DTYPES}.get(f"torch.{name}", torch.float32)


def _match(shards: Shards, config: DecoderConfig, stored: Iterable[Stored]) -> dict[str, str]:
    """The name in the files of every tensor that the model needs, by its usual name."""
    names, missing = {}, []
    for wanted in (name for entry in stored for name in entry.theirs):
        spellings = (wanted, *alternatives(config, wanted))
        found = next((name for name in spellings if name in shards.where), None)
        if found is None:
            missing.append(wanted)
        else:
            names[wanted] = found
    if missing:
        raise OutsizeError(
            f"{shards.directory}: {_some(missing)} missing: the weights are not of the model that "
            f"{CONFIG} describes"
        )
    known = set(names.values())
    extra = [n for n in shards.where if n not in known and not ignorable(config, n)]
    if extra:
        file = shards.where[extra[0]].path.name
        raise OutsizeError(
            f"{shards.directory}: {_some(extra)} unexpected (in {file}): the weights are not of "
            f"the model that {CONFIG} describes"
        )
    return names


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {names[0]!r}{more}"


def _check(
    shards: Shards, names: Mapping[str, str], model: Decoder, stored: Iterable[Stored]
) -> None:
    shapes = {name: x.detach().to("meta") for name, x in model.named_parameters()}
    for name, expected in merged(stored, shapes.__getitem__, shapes.__getitem__):
        header, entry = shards.where[names[name]], shards.entry(names[name])
        where = f"{header.path}: tensor {entry.name!r}"
        if entry.shape != expected.shape:
            raise OutsizeError(f"{where} has shape {entry.shape}, expected {expected.shape}")
        if (entry.dtype == torch.uint8) is not (expected.dtype == torch.uint8) or (
            entry.dtype not in (torch.uint8, *WEIGHT_DTYPES)
        ):
            raise OutsizeError(
                f"{where} has dtype {entry.dtype}, expected one of {_SPELLED}: "
                "load weights that are not quantised"
            )


def _reader(
    shards: Shards,
    names: Mapping[str, str],
    stored: Iterable[Stored],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Fill:
    """A fill for `materialise` that reads parameters from the files."""
    source = {name: entry for entry in stored for name in entry.ours}
    waiting: dict[str, Tensor] = {}  # of a group that rests in one tensor: those not yet asked for
    # one for all groups: freed ones between what stays would leave the heap full of holes
    staging = torch.empty(0, dtype=torch.uint8)

    def stage(entry: Stored, target: torch.dtype) -> tuple[Tensor, ...]:
        nonlocal staging
        found = [shards.entry(names[theirs]) for theirs in entry.theirs]
        sizes = [prod(x.shape) * target.itemsize for x in found]
        if staging.nbytes < sum(sizes):
            staging = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = staging[: sum(sizes)].view(target).split([n // target.itemsize for n in sizes])
        return tuple(
            shards.read(x.name, y.view(x.shape)) for x, y in zip(found, parts, strict=True)
        )

    def fill(name: str, parameter: Tensor) -> Tensor:
        if name in waiting:
            return waiting.pop(name)
        entry = source[name]
        first = shards.entry(names[entry.theirs[0]])
        target = rest(name, dtype or first.dtype)
        if target == torch.uint8:  # what codes are made of is read as it lies
            target = first.dtype
        if entry.unchanged:
            out = torch.empty(parameter.shape, dtype=target, device=device)
            return shards.read(first.name, out)
        for ours, x in zip(entry.ours, entry.split(stage(entry, target)), strict=True):
            waiting[ours] = _own(x.to(device), staging)
        return waiting.pop(name)

    return fill


def _own(x: Tensor, staging: Tensor) -> Tensor:
    """x in memory of its own: the staging buffer is about to be used again."""
    borrowed = x.untyped_storage().data_ptr() == staging.untyped_storage().data_ptr()
    return x.clone(memory_format=torch.contiguous_format) if borrowed else x.contiguous()


def check_tied_head(shards: Shards, config: DecoderConfig, tokens: Callable[[], Tensor]) -> None:
    """Files may hold a tied head beside the embedding; one that is not what `tokens` gives, the
    embedding, would be another model."""
    head = f"{config.names.outer['epilogue.head']}.weight"
    if config.tied and head in shards.where:
        embedding = tokens()
        if not torch.equal(shards.read(head).to(embedding), embedding):
            raise OutsizeError(
                f"{shards.where[head].path}: tensor {head!r} is not the token embedding, expected "
                f"equal ones: set tie_word_embeddings to false in {CONFIG}"
            )


# Saving


def write(model: Decoder, directory: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """The files of `save`, in a directory that is there."""
    values = {name: x.detach() for name, x in model.named_parameters()}
    config = model.config if model.config.coding is None else as_stored(model.config)
    stored = merged(layout(config), lambda name: values[name].to("meta"), values.__getitem__)
    files = write_groups(directory, ((WEIGHTS, *one) for one in stored), max_shard_bytes)
    write_config(directory, config, model.prologue.tokens.weight.dtype)
    write_json(directory / SUMS, sums_json(files))


def write_as(found: Described, directory: Path) -> int:
    """The files of a described model as its config asks for them, codes where that says so, made of
    one stored tensor at a time; gives the bytes of all. OutsizeError, naming file and tensor, for
    weights that cannot be read."""
    asked, values = found.model.config, dict(found.model.named_parameters())
    config = asked if asked.coding is None else as_stored(asked)
    dtypes, fill = found.dtypes(None), found.fill(None)

    def like(name: str) -> Tensor:
        return torch.empty(values[name].shape, dtype=dtypes[name], device="meta")

    def read(name: str) -> Tensor:
        return fill(name, values[name])

    check_tied_head(found.shards, config, lambda: read(TOKENS))
    stored = merged(layout(config), like, read)
    files = write_groups(directory, ((WEIGHTS, *one) for one in stored), MAX_SHARD_BYTES)
    write_config(directory, config, dtypes[TOKENS])
    write_json(directory / SUMS, sums_json(files))
    return sum(one.bytes for file in files.values() for one in file.tensors.values())


def write_config(directory: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
    """config.json as it was read, with the dtype of the weights as it is now."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config.source] or ["torch_dtype"]
    said = dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    write_json(directory / CONFIG, {**config.source, **said})
