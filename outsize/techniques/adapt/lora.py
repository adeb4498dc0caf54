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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outsize.errors import OutsizeError
from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Adapter,
    Naming,
    Weighed,
)
from outsize.models.low_rank import LowRank, scale
from outsize.models.naming import of_ranks
from outsize.models.targets import (
    ALL,
    TARGETS,
    OnLinears,
    check_rank,
    flag,
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
# The same of what only some of its versions know.
_NEWER = {
    "alora_invocation_tokens": None, "arrow_config": None, "kasa_config": None,
    "monteclora_config": None, "use_bdlora": None, "use_qalora": False,
}  # fmt: skip
INITIAL = "init_lora_weights"
_KEPT = ("gaussian", "eva", "mica", "orthogonal")  # begin so, beside weights that stay


@dataclass(frozen=True)
class Lora(OnLinears):
    """Which Linears of the blocks have an update of low rank, and of which rank."""

    key: ClassVar[str] = KEY
    rank: int = setting(16, "rank of the update of each weight", least=1)
    alpha: float = setting(16.0, "the update counts alpha / rank", least=1e-6)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)
    rank_stabilised: bool = setting(False, "the update counts alpha / sqrt(rank) instead")
    rate_ratio: float = setting(1.0, "learning rate of B over that of A, as in LoRA+", least=0)

    @property
    def scale(self) -> float:
        return scale(self.alpha, self.rank, self.rank_stabilised)

    def beside(self, name: str, one: Weighed) -> LowRank:
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return LowRank(one, self.rank, self.scale, self.rate_ratio)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return stored(FORMAT, adapted, said(self))

    def narrowed(self, rank: int) -> Lora:
        """The one of a lower rank whose components count as much each."""
        counted = math.sqrt(rank) if self.rank_stabilised else rank
        return replace(self, rank=rank, alpha=self.scale * counted)


def said(one: Any) -> dict[str, Any]:
    """What a file says of settings that have rank, alpha and rank_stabilised."""
    return {
        "r": one.rank, "lora_alpha": one.alpha, "lora_dropout": 0.0, MAGNITUDES: False,
        "use_rslora": one.rank_stabilised, INITIAL: True, **OTHERS,
    }  # fmt: skip


def read(found: Mapping[str, Any], naming: Naming) -> Any:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    if flag(found, MAGNITUDES):
        return FORMATS.get(f"{FORMAT} {MAGNITUDES}")(found, naming)
    return read_settings(found, naming, Lora)


def read_settings(
    found: Mapping[str, Any], naming: Naming, kind: Callable[..., OnLinears]
) -> Adapter:
    """The adapter of a kind that has rank, alpha, targets and whether the scale is the
    rank-stabilised one."""
    refuse_others(found, {**OTHERS, **_NEWER})
    begun = found.get(INITIAL, True)
    if not (isinstance(begun, bool) or str(begun).lower() in _KEPT):
        raise OutsizeError(
            f"adapter_config.json: {INITIAL} is {begun!r}, which has changed the weights beside"
            " which it was trained; expected an adapter of the weights as they are, as peft's"
            " save_pretrained(DIR, path_initial_model_for_weight_conversion=...) writes it"
        )
    stabilised = flag(found, "use_rslora")
    return of_ranks(found, naming, "lora_alpha", lambda *one: kind(*one, stabilised))


FORMATS.add(FORMAT, read)
technique(KEY, Lora, "trains an update of low rank beside each weight, which is frozen", exact=True)
