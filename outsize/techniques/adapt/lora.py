"""Low-rank adapters: a frozen weight W is used as W + scale B A, and A and B alone are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; the rank-stabilised scale:
Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023. Initial
values, names in files and adapter_config.json are peft's.

    adapt: {lora: {rank: 16}}           # in a run's file
    outsize train --set model=DIR --set adapt.lora.rank=16

On a tensor axis B of a column weight is cut as the weight is and A is whole; A of a row weight is
cut and B is whole, so that what is beside a worker's part of a product is in the same sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS
from outsize.models.config import DecoderConfig
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.decoder import Decoder
from outsize.models.linear import Linear, by_codes, dense, linears
from outsize.models.names import stored_module
from outsize.registry import setting, technique

KEY, FORMAT, ALL = "adapt.lora", "LORA", "all-linear"
# What peft may say in adapter_config.json that changes what is computed, beside what is read here.
OTHERS = {
    "bias": "none", "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None,
    "exclude_modules": None, "trainable_token_indices": None, "target_parameters": None,
    "lora_bias": False, "layer_replication": None,
}  # fmt: skip


@dataclass(frozen=True)
class Lora:
    """Which Linears of the blocks have an update of low rank, and of which rank."""

    rank: int = setting(16, "rank of the update of each weight", least=1)
    alpha: float = setting(16.0, "the update counts alpha / rank", least=0)
    targets: tuple[str, ...] = setting(
        (ALL,), "all-linear; or parts of blocks: attention, mlp; or weights: q, v, mlp.up"
    )
    rank_stabilised: bool = setting(False, "the update counts alpha / sqrt(rank) instead")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def attach(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        every = {name: one for name, one in linears(model)}
        for target in self.targets:
            if not any(_matches(name, target) for name in every):
                raise OutsizeError(
                    f"{KEY}.targets: {target!r} is no part of this model's blocks; expected {ALL},"
                    f" or some of {', '.join(dict.fromkeys(map(_inside, every)))}"
                )
        for name, one in every.items():
            if any(_matches(name, target) for target in self.targets):
                if one.product not in (dense, by_codes):
                    raise OutsizeError(
                        f"{KEY}: the model has kraken_ways, whose weights are multiplied way by way"
                        " and cannot have adapters; adapt the plain model instead"
                    )
                one.beside = LowRank(one, self.rank, self.scale)

    def to_json(self, config: DecoderConfig) -> dict[str, Any]:
        with torch.device("meta"):
            model = Decoder(config)
        adapted = [name for name, one in linears(model) if one.beside is not None]
        theirs = dict.fromkeys(_stored_inside(config, name) for name in adapted)
        transposed = [one for one in theirs if one in config.names.transposed]
        return {
            "peft_type": FORMAT, "task_type": "CAUSAL_LM", "inference_mode": True,
            "r": self.rank, "lora_alpha": self.alpha, "lora_dropout": 0.0,
            "use_rslora": self.rank_stabilised, "init_lora_weights": True,
            "target_modules": list(theirs), "fan_in_fan_out": bool(transposed), **OTHERS,
        }  # fmt: skip


class LowRank(nn.Module):
    """x (..., d_in) -> scale B A x (..., d_out), beside a Linear."""

    def __init__(self, one: Linear, rank: int, scale: float) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        start = Initial(bound=1 / math.sqrt(d_in))  # kaiming_uniform_ with a = sqrt(5)
        row = one.use == "row"
        self.a = _Factor((d_in, rank), one if row else None, start, "lora_A.weight")
        self.b = _Factor((rank, d_out), None if row else one, Initial(), "lora_B.weight")
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.scale)
        return y

    def change(self) -> Tensor:
        wide = torch.promote_types(self.a.weight.dtype, torch.float32)
        return (self.b.weight.to(wide) @ self.a.weight.to(wide)) * self.scale


class _Factor(Linear):
    """A or B. like: the Linear that it is cut as; None: it is whole on every worker."""

    def __init__(
        self, shape: tuple[int, int], like: Linear | None, start: Initial, file: str
    ) -> None:
        if like is None or like.use == "plain":
            super().__init__(*shape, whole=INSIDE)
        else:
            super().__init__(*shape, use=like.use, unit=like.unit)
        self.start, self.file = start, file

    def declare(self, leaf: str) -> Declared:
        return Declared(self.start, self.lies(leaf), self.file)


def _inside(name: str) -> str:
    """Of the name of a Linear, what is behind that of its block."""
    return name.split(".", 2)[2]


def _matches(name: str, target: str) -> bool:
    inside = f".{_inside(name)}."
    return target == ALL or inside.startswith(f".{target}.") or inside.endswith(f".{target}.")


def _stored_inside(config: DecoderConfig, name: str) -> str:
    """The same of its name in files."""
    layer = name.split(".")[1]
    return stored_module(config, f"{name}.weight").removeprefix(config.names.prefix.format(i=layer))


def read(said: Mapping[str, Any], config: DecoderConfig) -> Lora:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    for key, plain in OTHERS.items():
        if said.get(key, plain) not in (plain, None, [], {}):
            raise OutsizeError(
                f"adapter_config.json: {key} is {said[key]!r}; expected {plain!r}: what else peft"
                " can do is not read"
            )
    with torch.device("meta"):
        names = [name for name, _ in linears(Decoder(config))]
    targets = _targets(said.get("target_modules"), names, config)
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise OutsizeError(
            f"adapter_config.json: r is {rank!r} and lora_alpha {alpha!r}; expected two numbers"
        )
    return Lora(rank, float(alpha), targets, bool(said.get("use_rslora", False)))


def _targets(said: object, names: Iterable[str], config: DecoderConfig) -> tuple[str, ...]:
    """What target_modules names: ends of modules' names, or one expression for whole names."""
    wanted, others = set[str](), set[str]()
    for name in names:
        full = stored_module(config, f"{name}.weight")
        if isinstance(said, list):
            found = any(full == one or full.endswith(f".{one}") for one in said)
        else:
            found = said == ALL or re.fullmatch(str(said), full) is not None
        (wanted if found else others).add(_inside(name))
    if not wanted or wanted & others:
        raise OutsizeError(
            f"adapter_config.json: target_modules is {said!r}, which names"
            f" {'weights of some layers alone' if wanted else 'no weight of the blocks'}; expected"
            " weights of all layers"
        )
    return tuple(sorted(wanted))


FORMATS.add(FORMAT, read)
technique(KEY, Lora, "trains an update of low rank beside each weight, which is frozen", exact=True)
