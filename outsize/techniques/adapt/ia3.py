"""Activations rescaled: what some weights give, and what others take, times a trained vector.

Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context
Learning", 2022, (IA)^3: keys, values, and what the second feed-forward weight takes. Vectors begin
as ones. Files are peft's.

On a tensor axis a vector is cut with the side that it scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Naming,
    Part,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.declared import Declared, Initial
from outsize.models.targets import TARGETS, attach, refuse_others, stored
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.ia3", "IA3"
OUTPUTS, INPUTS = ("attention.k", "attention.v"), ("mlp.down",)


@dataclass(frozen=True)
class Ia3:
    """Which Linears of the blocks are scaled, and on which side."""

    outputs: tuple[str, ...] = setting(OUTPUTS, f"what gives is scaled: {TARGETS}")
    inputs: tuple[str, ...] = setting(INPUTS, "what takes is scaled, named alike")

    @property
    def parts(self) -> tuple[Part, ...]:
        entering = Part(f"{KEY}.inputs", self.inputs, lambda _, one: Scaled(one, enters=True))
        return (Part(f"{KEY}.outputs", self.outputs, given), entering)

    def attach(self, model: nn.Module) -> None:
        attach(model, self.parts)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        taking = [name for name, beside in adapted.beside.items() if beside.enters]
        own = {"feedforward_modules": taking, "init_ia3_weights": True}
        return stored(FORMAT, adapted, own)


def given(name: str, one: Weighed) -> Scaled:
    """Scales what a Linear gives. OutsizeError where its bias is added behind a sum over workers,
    and would not be scaled."""
    if one.use == "row" and one.bias is not None:
        raise OutsizeError(
            f"{KEY}.outputs: {name} has a bias that is added behind a sum; expected it among"
            f" {KEY}.inputs"
        )
    return Scaled(one, enters=False)


class Scaled(nn.Module):
    """W (l * x), or l * (W x + bias), beside a Linear of weight W."""

    def __init__(self, one: Weighed, enters: bool) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        self.enters = enters
        self.scale = nn.Parameter(torch.empty((1, d_in) if enters else (d_out, 1)))
        self.lies = along_input(one, 1) if enters else along_output(one, 0)

    def declare(self, _: str) -> Declared:
        return Declared(Initial(value=1.0), self.lies, "ia3_l")

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        if self.enters:
            return one.plain(x * self.scale.flatten())
        return one.plain(x) * self.scale.flatten()

    def merged(self, weight: Tensor) -> Tensor:
        return weight * self.scale

    def shift(self, bias: Tensor) -> Tensor:
        return bias if self.enters else bias * self.scale.flatten()


def read(found: Mapping[str, Any], naming: Naming) -> Ia3:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, {"layers_to_transform": None, "layers_pattern": None})
    every, key = naming.chosen(found, "target_modules"), "feedforward_modules"
    said = found.get(key)
    taking = set(naming.chosen({key: said}, key) if said else ()).intersection(every)
    given = [one for one in every if one not in taking]
    return Ia3(naming.targets(given), naming.targets(taking))


FORMATS.add(FORMAT, read)
technique(KEY, Ia3, "trains a scale for each feature that some weights give, and others take")
