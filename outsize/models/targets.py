"""Which Linears of a decoder an adapter changes, as a run's file says it and as peft's files do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import filter as numbered
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Adapter,
    Beside,
    Changes,
    Naming,
    Part,
    Weighed,
)
from outsize.models.config import DecoderConfig, LayerFacts
from outsize.models.decoder import Decoder
from outsize.models.linear import by_codes, dense, linears
from outsize.models.names import module_in_files, stored_module

ALL = "all-linear"
TARGETS = (
    "all-linear; or parts of blocks: attention, mlp; or weights: q, mlp.up, mlp.*, q_proj; or those"
    " of some blocks: blocks.3, blocks.[0-7].mlp"
)
FILE = "adapter_config.json"
_SHOWN = 16  # names of layers in a message
# What peft may say of every method that changes what is computed, and is not read here.
_OTHERS: Mapping[str, Any] = {
    "modules_to_save": None, "target_parameters": None,
}  # fmt: skip
# What changes nothing of what a trained adapter computes: where it is from, how it began and was
# trained, what a layer's class says itself, and sizes of what is refused where it is switched on.
_APART = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "encoder_dropout",
    "encoder_hidden_size", "encoder_num_layers", "encoder_reparameterization_type",
    "ensure_weight_tying", "eps", "eva_config", "fan_in_fan_out", "inference_mode",
    "init_ia3_weights", "init_weights", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "num_attention_heads", "num_layers", "peft_type",
    "peft_version", "prefix_projection", "projection_prng_key", "prompt_tuning_init",
    "prompt_tuning_init_text", "qalora_group_size", "revision", "runtime_config", "task_type",
    "token_dim", "tokenizer_kwargs", "tokenizer_name_or_path", "velora_config", "vera_dropout",
})  # fmt: skip


class OnLinears:
    """Settings of an adapter that has one thing beside each Linear that `targets` names. key: that
    of the settings."""

    key: ClassVar[str]
    targets: tuple[str, ...]

    def beside(self, name: str, one: Weighed) -> Beside:
        """What a linear layer of this name has beside it. OutsizeError for one that it cannot be
        beside."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(f"{self.key}.targets", self.targets, self.beside),)

    def attach(self, model: nn.Module) -> None:
        attach(model, self.parts)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        """What its adapter_config.json says, as peft reads it."""
        raise NotImplementedError


def attach(model: nn.Module, parts: Iterable[Part]) -> None:
    """Freeze a decoder and give its Linears what an adapter puts beside them. OutsizeError as of
    `chosen`, and for a model whose weights are multiplied otherwise."""
    assert isinstance(model, Decoder)
    every, layers = dict(linears(model)), model.config.layers

    def sees(part: int, target: str, name: str) -> bool:
        if (of := _of_layers(target)) is None:
            return _matches(inside(name), target)
        own = layers[int(name.split(".")[1])].beside or ()
        return (part, of[1]) in own and _matches(inside(name), of[1])

    parts = [_in_own_names(model.config, one, every) for one in parts]
    found = list(chosen(parts, every, inside, sees))
    for key, name, _ in found:
        if every[name].product not in (dense, by_codes) or every[name].beside is not None:
            own = model.config.weights
            raise OutsizeError(
                f"{key}: the model has {model.config.rewired if own is None else own.key}, whose"
                " weights are multiplied in a way of their own and cannot have adapters; adapt the"
                " plain model instead"
            )
    freeze(model)
    for _, name, beside in found:
        every[name].beside = beside


def by_layer(adapter: Adapter, layers: tuple[LayerFacts, ...]) -> tuple[LayerFacts, ...]:
    """Layers that say which of an adapter's targets are theirs, where some name layers: those of a
    whole model, or of one that says so already. No gradient reaches one up to which there are none.
    OutsizeError for a target that names no layer."""
    parts = adapter.parts if isinstance(adapter, Changes) else ()
    said = [(k, part.key, target) for k, part in enumerate(parts) for target in part.targets]
    some = [(k, key, *of) for k, key, target in said if (of := _of_layers(target)) is not None]
    if not some or all(layer.beside is not None for layer in layers):
        return layers
    numbers = [str(i) for i in range(len(layers))]
    for _, key, where, _ in some:
        if not numbered(numbers, where):
            raise OutsizeError(
                f"{key}: blocks.{where} names none of the {len(layers)} blocks of this model;"
                f" expected 0 to {len(layers) - 1}"
            )
    own = [tuple((k, t) for k, _, p, t in some if fnmatchcase(i, p)) for i in numbers]
    began = 0 if len(some) < len(said) else next(i for i, one in enumerate(own) if one)
    each = enumerate(zip(layers, own, strict=True))
    return tuple(replace(x, beside=one, idle=x.idle or i < began) for i, (x, one) in each)


def _of_layers(target: str) -> tuple[str, str] | None:
    """Of a target that names blocks by number: a pattern of these, and what it names there."""
    found = re.fullmatch(r"blocks\.([^.]+)(?:\.(.+))?", target)
    return None if found is None else (found[1], found[2] or ALL)


def _in_own_names(config: DecoderConfig, part: Part, every: Iterable[str]) -> Part:
    """The same, where a target is what files of the model call a Linear, as q_proj. OutsizeError
    for what they call one of some layers alone."""
    stored = {name: module_in_files(config, f"{name}.weight")[0] for name in every}

    def names(target: str) -> tuple[str, ...]:
        if _of_layers(target) or any(_matches(inside(own), target) for own in stored):
            return (target,)
        found = [own for own, full in stored.items() if named(full, [target])]
        kinds = dict.fromkeys(map(inside, found))
        if len(found) < sum(inside(own) in kinds for own in stored):
            raise OutsizeError(
                f"{part.key}: {target!r} is what files call weights of some blocks alone; expected"
                f" their names here: {some(found)}"
            )
        return tuple(kinds) or (target,)

    return replace(part, targets=tuple(own for one in part.targets for own in names(one)))


def freeze(model: nn.Module) -> None:
    """No parameter that a model has so far is trained."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def chosen(
    parts: Iterable[Part],
    every: Mapping[str, Weighed],
    shown: Callable[[str], str],
    sees: Callable[[int, str, str], bool] = lambda _, target, name: _matches(name, target),
) -> Iterator[tuple[str, str, Beside]]:
    """(setting, name of a layer, what is beside it) of what an adapter changes of all linear layers
    of a model. shown: of a name, what users are told; sees: whether a target of a part, by its
    number, names a layer. OutsizeError for a target that names none, for a layer that is named
    twice, and for one that cannot be adapted."""
    done = set[str]()
    for k, part in enumerate(parts := tuple(parts)):
        if not every:
            raise OutsizeError(f"{part.key}: the model has no linear layer; expected one that has")
        for target in part.targets:
            if not any(sees(k, target, name) for name in every):
                raise OutsizeError(
                    f"{part.key}: {target!r} names no linear layer of this model; expected {ALL},"
                    f" or some of {some(map(shown, every))}"
                )
        found = [n for n in every if any(sees(k, one, n) for one in part.targets)]
        make = part.make
        if part.together is not None and found:
            make = part.together([every[name] for name in found])
        for name in found:
            if name in done:
                raise OutsizeError(
                    f"{part.key}: {shown(name)} is named twice; expected each in one place"
                )
            done.add(name)
            yield part.key, name, make(shown(name), every[name])
    if parts and not done:
        keys = " and ".join(part.key for part in parts)
        raise OutsizeError(
            f"{keys}: no layer is named; expected {ALL}, or {some(map(shown, every))}"
        )


def some(names: Iterable[str]) -> str:
    """The first of some names, for messages."""
    every = list(dict.fromkeys(names))
    return ", ".join(every[:_SHOWN]) + (", ..." if len(every) > _SHOWN else "")


def check_rank(key: str, rank: int, name: str, one: Weighed) -> None:
    """OutsizeError for a rank that a weight cannot have."""
    if rank > (most := min(one.sizes)):
        raise OutsizeError(
            f"{key}: {rank} is above the width {most} of {name}; expected at most {most}, or"
            " targets that leave it out"
        )


def inside(name: str) -> str:
    """Of the name of a Linear, what is behind that of its block."""
    return name.split(".", 2)[2]


def _matches(path: str, target: str) -> bool:
    own = f".{path}."
    plain = own.startswith(f".{target}.") or own.endswith(f".{target}.")
    return plain or target == ALL or fnmatchcase(path, target)


# -- as peft's files have it -----------------------------------------------------------------------


def stored(kind: str, adapted: Adapted, said: Mapping[str, Any]) -> dict[str, Any]:
    """What every method says in its adapter_config.json. kind: its peft_type; said: its own."""
    return {
        "peft_type": kind, "task_type": "CAUSAL_LM", "inference_mode": True,
        "target_modules": list(adapted.beside),
        **({"fan_in_fan_out": True} if adapted.transposed else {}), **said,
    }  # fmt: skip


def adapted(config: DecoderConfig) -> Adapted:
    """What the adapter of a decoder changes."""
    with torch.device("meta"):
        model = Decoder(config)
    every = {name: one.beside for name, one in linears(model)}
    alone = {inside(name) for name, beside in every.items() if beside is None}
    alone |= {of[1] for one in config.layers for of in one.beside or ()}
    found, targets, transposed = dict[str, Beside](), dict[str, str](), False
    for name, beside in every.items():
        if beside is not None:
            whole, own = stored_module(config, f"{name}.weight"), inside(name)
            short = whole.removeprefix(config.names.prefix.format(i=name.split(".")[1]))
            transposed |= short in config.names.transposed
            file, target = (whole, name) if own in alone else (short, own)
            found[file], targets[file] = beside, target
    return Adapted(found, targets, transposed)


class _Said(Mapping[str, Any]):
    """An adapter_config.json. asked: the fields that somebody has looked at."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields, self.asked = fields, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def read(fields: Mapping[str, Any], naming: Naming) -> Adapter:
    """The adapter that an adapter_config.json says. OutsizeError for a method that is not known,
    and for a field that says something and that the method does not read."""
    method = fields.get("peft_type")
    found = FORMATS.find(str(method))
    if found is None:
        raise OutsizeError(
            f"{FILE}: peft_type is {method!r}; expected one of"
            f" {', '.join(name for name in FORMATS.names() if ' ' not in name)}"
        )
    adapter = found(said := _Said(fields), naming)
    for key in said:
        if key not in said.asked | _APART and fields[key] not in (None, False, 0, "", [], {}):
            raise OutsizeError(
                f"{FILE}: {key} is {fields[key]!r}, a field of {method} that is not known here and"
                " may change what is computed; take it out of the file if it does not"
            )
    return adapter


def refuse_others(said: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """OutsizeError where an adapter_config.json says what is not read. own: what the method's may
    say beside what it reads, and the one value that is right."""
    for key, plain in {**_OTHERS, **own}.items():
        if said.get(key, plain) not in (plain, None, [], {}):
            raise OutsizeError(
                f"{FILE}: {key} is {said[key]!r}; expected {plain!r}: what else peft can do is not"
                " read; let it merge that (merge_and_unload) and give the merged model"
            )


def number(said: Mapping[str, Any], key: str, kind: type = int) -> Any:
    """A finite number above 0 that an adapter_config.json has to say, of `kind`. OutsizeError
    else."""
    found, kinds = said.get(key), int if kind is int else int | float
    if isinstance(found, bool) or not isinstance(found, kinds) or not 0 < found < math.inf:
        what = "whole number" if kind is int else "number"
        raise OutsizeError(f"{FILE}: {key} is {found!r}; expected a {what} above 0")
    return kind(found)


def flag(said: Mapping[str, Any], key: str) -> bool:
    """What an adapter_config.json says is so; not, where it says nothing. OutsizeError for what is
    neither true nor false."""
    found = said.get(key)
    if found is not None and not isinstance(found, bool):
        raise OutsizeError(f"{FILE}: {key} is {found!r}; expected true or false")
    return bool(found)


def texts(said: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts that an adapter_config.json has to say. OutsizeError else."""
    found = said.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(x, str) for x in found):
        raise OutsizeError(f"{FILE}: {key} is {found!r}; expected a list of names")
    return tuple(found)


def named(full: str, said: object) -> bool:
    """Whether peft's target_modules names a module of this full name. OutsizeError for a text that
    is no regular expression."""
    if isinstance(said, list):
        return any(full == one or full.endswith(f".{one}") for one in said)
    try:
        return said == ALL or re.fullmatch(str(said), full) is not None
    except re.error as error:
        raise OutsizeError(
            f"{FILE}: {said!r} is no regular expression ({error}); expected one for whole names of"
            " modules, or a list of their ends"
        ) from None
