"""Changes from random projections that all weights share: W + (b * B) (d * A), b and d trained.

Kopiczko et al., "VeRA: Vector-based Random Matrix Adaptation", 2024. A (rank, I) and B (O, rank)
are drawn once and never trained; a weight takes the first columns and rows of theirs. b (O) begins
as zeros, d (rank) as a small number. Files are peft's, with A and B in them once.

    adapt: {vera: {rank: 256}}                      # in a run's file

A weight has its part of A and B beside it, since it may lie anywhere: they take the memory of a
low-rank adapter's frozen values, and no gradients or states. On a tensor axis A, B and b are cut as
the weight is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Beside,
    Naming,
    Part,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.low_rank import Factor
from outsize.models.targets import TARGETS, attach, number, refuse_others, stored
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.vera", "VERA"
FILES = "/base_model.vera_A", "/base_model.vera_B"
OTHERS = {"save_projection": True, "bias": "none"}


@dataclass(frozen=True)
class Vera:
    """Which Linears of the blocks have it, how many projections there are, and how they count."""

    rank: int = setting(256, "random projections that all weights share", least=1)
    initial: float = setting(0.1, "what each projection counts at first", least=1e-6)
    targets: tuple[str, ...] = setting(("attention.q", "attention.v"), TARGETS)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(f"{KEY}.targets", self.targets, self.alone, self.together),)

    def together(self, every: Sequence[Weighed]) -> Callable[[str, Weighed], Beside]:
        """Of all linear layers that it changes, what gives what is beside one."""
        return partial(self.beside, most=max(one.sizes[1] for one in every))

    def alone(self, name: str, one: Weighed) -> Beside:
        """What is beside the one layer that it changes."""
        return self.together((one,))(name, one)

    def beside(self, _: str, one: Weighed, most: int) -> Scaled:
        """What a linear layer has beside it. most: features that any of them takes."""
        return Scaled(one, self.rank, most, self.initial)

    def attach(self, model: nn.Module) -> None:
        attach(model, self.parts)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {"r": self.rank, "d_initial": self.initial, "vera_dropout": 0.0, **OTHERS}
        return stored(FORMAT, adapted, own)


class Scaled(nn.Module):
    """W x + b * (B (d * A x)), beside a Linear of weight W."""

    enters = False

    def __init__(self, one: Weighed, rank: int, most: int, initial: float) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        # kaiming_uniform_ of the whole of each: 6 / its columns
        start = Initial(bound=math.sqrt(6 / most), alike=("vera A", most))
        a = Declared(start, along_input(one, 1), FILES[0], nested=True)
        start = Initial(bound=math.sqrt(6 / rank), alike=("vera B", rank))
        b = Declared(start, along_output(one, 0), FILES[1], nested=True)
        self.a, self.b = Factor((d_in, rank), a), Factor((rank, d_out), b)
        for factor in (self.a, self.b):
            factor.weight.requires_grad_(False)
        self.outputs = nn.Parameter(torch.empty(d_out))
        self.inside = nn.Parameter(torch.empty(rank))
        self.declared = {
            "outputs": Declared(Initial(), along_output(one, 0), "vera_lambda_b"),
            "inside": Declared(Initial(value=initial), INSIDE, "vera_lambda_d"),
        }

    def declare(self, leaf: str) -> Declared:
        return self.declared[leaf]

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        y: Tensor = one.plain(x) + self.outputs * self.b(self.inside * self.a(x))
        return y

    def merged(self, weight: Tensor) -> Tensor:
        leaves = (self.outputs[:, None], self.b.weight, self.inside[:, None], self.a.weight)
        outputs, b, inside, a = (x.to(weight.dtype) for x in leaves)
        return weight + (outputs * b) @ (inside * a)

    def shift(self, bias: Tensor) -> Tensor:
        return bias


def read(found: Mapping[str, Any], naming: Naming) -> Vera:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, OTHERS)
    initial = number(found, "d_initial", float) if "d_initial" in found else 0.1
    return Vera(number(found, "r"), initial, naming(found))


FORMATS.add(FORMAT, read)
technique(KEY, Vera, "trains what random projections, which all weights share, count for each")
