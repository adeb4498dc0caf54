"""Weights by magnitude and direction: W + scale B A, each row with the length m, which is trained.

Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024: the length of a row of W + scale
B A counts as a constant where gradients are taken (section 4.3). A and B begin as LoRA's do, m as
the lengths of W's rows. Files are peft's, with use_dora.

On a tensor axis lengths of a row weight's rows are summed over the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outsize.models.adapter import FORMATS, Adapted, Adapter, Naming, Squares, Weighed, along_output
from outsize.models.declared import Declared, Initial
from outsize.models.low_rank import LowRank, scale
from outsize.models.targets import ALL, TARGETS, OnLinears, check_rank, stored
from outsize.registry import setting, technique
from outsize.techniques.adapt.lora import FORMAT, MAGNITUDES, read_settings, said

KEY = "adapt.dora"


@dataclass(frozen=True)
class Dora(OnLinears):
    """Which Linears of the blocks have it, and the rank of their directions' updates."""

    key: ClassVar[str] = KEY
    rank: int = setting(16, "rank of the update of each weight's direction", least=1)
    alpha: float = setting(16.0, "the update counts alpha / rank", least=1e-6)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)
    rank_stabilised: bool = setting(False, "the update counts alpha / sqrt(rank) instead")

    def beside(self, name: str, one: Weighed) -> Directed:
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return Directed(one, self.rank, scale(self.alpha, self.rank, self.rank_stabilised))

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {**said(self), MAGNITUDES: True}
        return stored(FORMAT, adapted, own)


class Directed(nn.Module):
    """m / |W + scale B A| (W x + scale B A x), row by row."""

    enters = False
    begins, room = ("magnitude",), 1

    def __init__(self, one: Weighed, rank: int, scale: float) -> None:
        super().__init__()
        self.low = LowRank(one, rank, scale)
        self.magnitude = nn.Parameter(torch.empty(one.sizes[0]))
        self.lies = along_output(one, 0)
        self.squares = Squares(one.use == "row")

    def declare(self, leaf: str) -> Declared:
        return Declared(Initial(value=1.0), self.lies, "lora_magnitude_vector")

    def begin(self, weight: Tensor) -> dict[str, Tensor]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return {"magnitude": torch.linalg.vector_norm(weight, dim=1, dtype=wide)}

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        y: Tensor = (one.plain(x) + self.low.update(x)) * self.lengths(one.matrix())
        return y

    def lengths(self, weight: Tensor) -> Tensor:
        """(d_out), what rows of the product are multiplied by, in the magnitude's dtype."""
        square: Tensor = self.squares(weight, self.low.a.weight, self.low.b.weight * self.low.scale)
        return self.magnitude / square.sqrt().to(self.magnitude.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        directed: Tensor = self.low.merged(weight)
        length = torch.linalg.vector_norm(directed, dim=1, keepdim=True)
        merged: Tensor = directed * (self.magnitude[:, None] / length)
        return merged

    def shift(self, bias: Tensor) -> Tensor:
        return bias


def read(found: Mapping[str, Any], naming: Naming) -> Adapter:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    return read_settings(found, naming, Dora)


FORMATS.add(f"{FORMAT} {MAGNITUDES}", read)
technique(KEY, Dora, "trains each frozen weight's lengths of rows, and directions by a low rank")
