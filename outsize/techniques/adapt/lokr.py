"""Changes that are Kronecker products: W + scale (C x D), C small and dense, D of low rank.

Edalati et al., "KronA: Parameter Efficient Tuning with Kronecker Adapter", 2022; as an adapter in
LyCORIS (Yeh et al., 2023) and peft, whose files these are.

Both sides of W are seen as a product of two numbers, as near to each other as can be; C has the
smaller ones. The product is taken factor by factor, so the change is never made. On a tensor axis C
is cut: what a worker has of a side must be whole rows or columns of C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Adapter,
    Naming,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.naming import of_ranks
from outsize.models.targets import (
    ALL,
    TARGETS,
    OnLinears,
    check_rank,
    refuse_others,
    stored,
)
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.lokr", "LOKR"
OTHERS = {
    "rank_dropout": 0.0, "module_dropout": 0.0, "rank_dropout_scale": False,
    "use_effective_conv2d": False, "decompose_both": False, "decompose_factor": -1,
}  # fmt: skip


@dataclass(frozen=True)
class Lokr(OnLinears):
    """Which Linears of the blocks have it, and the rank of the larger factor."""

    key: ClassVar[str] = KEY
    rank: int = setting(8, "rank of the larger factor, which is dense where it is small", least=1)
    alpha: float = setting(8.0, "the update counts alpha / rank", least=1e-6)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)

    def beside(self, name: str, one: Weighed) -> Kronecker:
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return Kronecker(one, self.rank, self.alpha / self.rank)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {"r": self.rank, "alpha": self.alpha, "init_weights": True, **OTHERS}
        return stored(FORMAT, adapted, own)


def factors(size: int) -> tuple[int, int]:
    """The two numbers nearest to each other whose product is size, the smaller one first."""
    small = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return small, size // small


class Kronecker(nn.Module):
    """W x + scale (C x D) x, beside a Linear of weight W. c: (out of C, in of C); d, or its factors
    b (out of D, rank) and a (rank, in of D)."""

    enters = False

    def __init__(self, one: Weighed, rank: int, scale: float) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        (c_out, d_out), (c_in, d_in) = factors(d_out), factors(d_in)
        self.scale, self.columns = scale, d_in
        dense = rank >= max(d_out, d_in) / 2
        self.c = nn.Parameter(torch.empty(c_out, c_in))
        self.d = nn.Parameter(torch.empty(d_out, d_in)) if dense else None
        self.b = None if dense else nn.Parameter(torch.empty(d_out, rank))
        self.a = None if dense else nn.Parameter(torch.empty(rank, d_in))
        self.lies = along_input(one, 1) if one.use == "row" else along_output(one, 0)

    def declare(self, leaf: str) -> Declared:
        """kaiming_uniform_ with a = sqrt(5) is uniform within 1 / sqrt(columns)."""
        if leaf == "c":
            return Declared(Initial(), self.lies, "lokr_w1")
        start = Initial(bound=1 / math.sqrt(self.get_parameter(leaf).shape[1]))
        file = {"d": "lokr_w2", "b": "lokr_w2_a", "a": "lokr_w2_b"}[leaf]
        return Declared(start, INSIDE, file)

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        plain = one.plain(x)
        y: Tensor = x.unflatten(-1, (-1, self.columns))  # (..., in of C, in of D)
        for factor in (self.d,) if self.a is None or self.b is None else (self.a, self.b):
            assert factor is not None
            y = y @ factor.t()
        y = (y.transpose(-1, -2) @ self.c.t()).transpose(-1, -2)  # (..., out of C, out of D)
        return plain + y.flatten(-2) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        factors = [p.to(weight.dtype) for p in (self.d, self.b, self.a) if p is not None]
        d = factors[0] if len(factors) == 1 else factors[0] @ factors[1]
        return weight + torch.kron(self.c.to(weight.dtype), d) * self.scale

    def shift(self, bias: Tensor) -> Tensor:
        return bias


def read(found: Mapping[str, Any], naming: Naming) -> Adapter:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, OTHERS)
    return of_ranks(found, naming, "alpha", Lokr)


FORMATS.add(FORMAT, read)
technique(KEY, Lokr, "trains an update of each frozen weight, a Kronecker product")
