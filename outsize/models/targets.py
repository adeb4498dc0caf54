"""Which Linears of a decoder an adapter changes, as a run's file says it and as peft's files do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adapter import Beside
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.linear import Linear, by_codes, dense, linears
from outsize.models.names import stored_module

ALL = "all-linear"
TARGETS = "all-linear; or parts of blocks: attention, mlp; or weights: q, v, mlp.up"
_FILE = "adapter_config.json"
# What peft may say of every method that changes what is computed, and is not read here.
_OTHERS: Mapping[str, Any] = {
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None,
    "layers_pattern": None, "exclude_modules": None, "target_parameters": None,
}  # fmt: skip


def freeze(model: nn.Module) -> None:
    """Nothing of a model is trained from here on but what is added to it."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def attach(
    model: nn.Module, key: str, targets: Collection[str], make: Callable[[str, Linear], Beside]
) -> None:
    """Give the Linears that the setting `key` names what `make` makes of their name in a block and
    themselves. OutsizeError for a target that names none, and for one that cannot be adapted."""
    every = dict(linears(model))
    for target in targets:
        if not any(_matches(name, target) for name in every):
            raise OutsizeError(
                f"{key}: {target!r} is no part of this model's blocks; expected {ALL}, or some of"
                f" {', '.join(dict.fromkeys(map(inside, every)))}"
            )
    for name, one in every.items():
        if any(_matches(name, target) for target in targets):
            if one.product not in (dense, by_codes):
                raise OutsizeError(
                    f"{key}: the model has kraken_ways, whose weights are multiplied way by way"
                    " and cannot have adapters; adapt the plain model instead"
                )
            if one.beside is not None:
                raise OutsizeError(
                    f"{key}: {inside(name)} is named twice; expected each weight in one place"
                )
            one.beside = make(inside(name), one)


def check_rank(key: str, rank: int, name: str, one: Linear) -> None:
    """OutsizeError for a rank that a weight cannot have."""
    if rank > (most := min(one.sizes)):
        raise OutsizeError(
            f"{key}: {rank} is above the width {most} of {name}; expected at most {most}"
        )


def inside(name: str) -> str:
    """Of the name of a Linear, what is behind that of its block."""
    return name.split(".", 2)[2]


def _matches(name: str, target: str) -> bool:
    own = f".{inside(name)}."
    return target == ALL or own.startswith(f".{target}.") or own.endswith(f".{target}.")


# -- as peft's files have it -----------------------------------------------------------------------


def stored(
    config: DecoderConfig, kind: str, said: Mapping[str, Any], chosen: Callable[[Linear], bool]
) -> dict[str, Any]:
    """What every method says in its adapter_config.json. kind: its peft_type; said: its own;
    chosen: whether a Linear of the model with its adapter is one that it changes."""
    theirs = stored_names(config, chosen)
    transposed = {"fan_in_fan_out": True} if set(theirs) & set(config.names.transposed) else {}
    return {
        "peft_type": kind, "task_type": "CAUSAL_LM", "inference_mode": True,
        "target_modules": theirs, **transposed, **said,
    }  # fmt: skip


def stored_names(config: DecoderConfig, chosen: Callable[[Linear], bool]) -> list[str]:
    """Of the Linears that an adapter changes in some way, the names in files, behind a block's."""
    with torch.device("meta"):
        model = Decoder(config)
    adapted = [name for name, one in linears(model) if one.beside is not None and chosen(one)]
    return list(dict.fromkeys(_stored_inside(config, name) for name in adapted))


def _stored_inside(config: DecoderConfig, name: str) -> str:
    """What `inside` gives, of the name in files."""
    layer = name.split(".")[1]
    return stored_module(config, f"{name}.weight").removeprefix(config.names.prefix.format(i=layer))


def refuse_others(said: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """OutsizeError where an adapter_config.json says what is not read. own: what the method's may
    say beside what it reads, and the one value that is right."""
    for key, plain in {**_OTHERS, **own}.items():
        if said.get(key, plain) not in (plain, None, [], {}):
            raise OutsizeError(
                f"{_FILE}: {key} is {said[key]!r}; expected {plain!r}: what else peft can do is not"
                " read"
            )


def number(said: Mapping[str, Any], key: str, kind: type = int) -> Any:
    """A number above 0 that an adapter_config.json has to say, of `kind`. OutsizeError else."""
    found = said.get(key)
    good = isinstance(found, int | float) and not isinstance(found, bool) and found > 0
    if not good or (kind is int and not isinstance(found, int)):
        raise OutsizeError(f"{_FILE}: {key} is {found!r}; expected a number above 0")
    return kind(found)


def targets_of(said: object, config: DecoderConfig, key: str = "target_modules") -> tuple[str, ...]:
    """What target_modules names: ends of modules' names, or one expression for whole names."""
    with torch.device("meta"):
        names = [name for name, _ in linears(Decoder(config))]
    return _targets(said, names, config, key)


def _targets(
    said: object, names: Iterable[str], config: DecoderConfig, key: str
) -> tuple[str, ...]:
    wanted, others = set[str](), set[str]()
    for name in names:
        full = stored_module(config, f"{name}.weight")
        if isinstance(said, list):
            found = any(full == one or full.endswith(f".{one}") for one in said)
        else:
            found = said == ALL or re.fullmatch(str(said), full) is not None
        (wanted if found else others).add(inside(name))
    if not wanted or wanted & others:
        raise OutsizeError(
            f"{_FILE}: {key} is {said!r}, which names"
            f" {'weights of some layers alone' if wanted else 'no weight of the blocks'}; expected"
            " weights of all layers"
        )
    return tuple(sorted(wanted))
