"""Low-rank adapters: a frozen weight W is used as W + scale B A, and A and B alone are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; the rank-stabilised scale:
Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023; a learning
rate of B by itself: Hayou et al., "LoRA+: Efficient Low Rank Adaptation of Large Models", 2024.
Initial values, names in files and adapter_config.json are peft's.

    adapt: {lora: {rank: 16}}           # in a run's file
    outsize train --set model=DIR --set adapt.lora.rank=16

On a tensor axis B of a column weight is cut as the weight is and A is whole; A of a row weight is
cut and B is whole, so that what is beside a worker's part of a product is in the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Naming,
    Nested,
    Part,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.linear import Linear
from outsize.models.targets import (
    ALL,
    TARGETS,
    attach,
    check_rank,
    number,
    refuse_others,
    stored,
)
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.lora", "LORA"
MAGNITUDES = "use_dora"  # in a file: it is another method's
# What peft may say that changes what is computed, beside what is read here.
OTHERS = {
    "bias": "none", "trainable_token_indices": None, "lora_bias": False, "layer_replication": None,
}  # fmt: skip


@dataclass(frozen=True)
class Lora:
    """Which Linears of the blocks have an update of low rank, and of which rank."""

    rank: int = setting(16, "rank of the update of each weight", least=1)
    alpha: float = setting(16.0, "the update counts alpha / rank", least=0)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)
    rank_stabilised: bool = setting(False, "the update counts alpha / sqrt(rank) instead")
    rate_ratio: float = setting(1.0, "learning rate of B over that of A, as in LoRA+", least=0)

    @property
    def scale(self) -> float:
        return scale(self.alpha, self.rank, self.rank_stabilised)

    def beside(self, name: str, one: Weighed) -> LowRank:
        """What a linear layer of this name has beside it."""
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return LowRank(one, self.rank, self.scale, self.rate_ratio)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(f"{KEY}.targets", self.targets, self.beside),)

    def attach(self, model: nn.Module) -> None:
        attach(model, self.parts)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return stored(FORMAT, adapted, said(self))

    def narrowed(self, rank: int) -> Lora:
        """The one of a lower rank whose components count as much each."""
        counted = math.sqrt(rank) if self.rank_stabilised else rank
        return replace(self, rank=rank, alpha=self.scale * counted)


def scale(alpha: float, rank: int, rank_stabilised: bool) -> float:
    """What an update of low rank counts."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def said(one: Any) -> dict[str, Any]:
    """What a file says of settings that have rank, alpha and rank_stabilised."""
    return {
        "r": one.rank, "lora_alpha": one.alpha, "lora_dropout": 0.0, MAGNITUDES: False,
        "use_rslora": one.rank_stabilised, "init_lora_weights": True, **OTHERS,
    }  # fmt: skip


class LowRank(Nested):
    """W x + scale B A x, beside a Linear of weight W."""

    enters = False

    def __init__(self, one: Weighed, rank: int, scale: float, ratio: float = 1.0) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        start = Initial(bound=1 / math.sqrt(d_in))  # kaiming_uniform_ with a = sqrt(5)
        a = Declared(start, along_input(one, 1), "lora_A.weight")
        b = Declared(Initial(), along_output(one, 0), "lora_B.weight", rate=ratio)
        self.a, self.b = Factor((d_in, rank), a), Factor((rank, d_out), b)
        self.rank, self.scale = rank, scale

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        return one.plain(x) + self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """scale B A x."""
        inner = self.a(x) * self.scale
        if self.used is not None:
            inner = F.pad(inner[..., : self.used], (0, self.rank - self.used))
        y: Tensor = self.b(inner)
        return y

    def change(self) -> Tensor:
        """scale B A, float32 at least."""
        wide = torch.promote_types(self.a.weight.dtype, torch.float32)
        return (self.b.weight.to(wide) @ self.a.weight.to(wide)) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        return weight + self.change()

    def shift(self, bias: Tensor) -> Tensor:
        return bias


class Factor(Linear):
    """A or B: a Linear that lies and begins as it is told."""

    def __init__(self, shape: tuple[int, int], declared: Declared) -> None:
        super().__init__(*shape, whole=INSIDE)
        self.declared = declared

    def declare(self, leaf: str) -> Declared:
        return self.declared


def read(found: Mapping[str, Any], naming: Naming) -> Any:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    if found.get(MAGNITUDES):
        return FORMATS.get(f"{FORMAT} {MAGNITUDES}")(found, naming)
    return Lora(*read_settings(found, naming))


def read_settings(
    found: Mapping[str, Any], naming: Naming
) -> tuple[int, float, tuple[str, ...], bool]:
    """Rank, alpha, targets and whether the scale is the rank-stabilised one."""
    refuse_others(found, OTHERS)
    targets = naming(found.get("target_modules"))
    stabilised = bool(found.get("use_rslora", False))
    return number(found, "r"), number(found, "lora_alpha", float), targets, stabilised


FORMATS.add(FORMAT, read)
technique(KEY, Lora, "trains an update of low rank beside each weight, which is frozen", exact=True)
