"""Updates of low rank beside a Linear: two small products in a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.models.adapter import Nested, Weighed, along_input, along_output
from outsize.models.declared import INSIDE, Declared, Initial
from outsize.models.linear import Linear


def scale(alpha: float, rank: int, rank_stabilised: bool) -> float:
    """What an update of low rank counts."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


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
