"""Low-rank adapters that begin as the principal parts of the weights: W + scale (B A - B0 A0).

Meng, Wang and Zhang, "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large
Language Models", 2024. B A begins as what the R largest singular values make of W, and is trained;
B0 A0 stays that. So W, in which the paper puts what is left of it, may stay in its files.

Files are peft's of a low-rank adapter of rank 2 R, as peft converts its own: they go with the
weights as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outsize.models.adapter import Adapted, Weighed, along_input, along_output
from outsize.models.declared import Declared, Initial
from outsize.models.low_rank import Factor, scale
from outsize.models.targets import ALL, TARGETS, OnLinears, check_rank, stored
from outsize.registry import setting, technique
from outsize.techniques.adapt.lora import FORMAT, said

KEY = "adapt.pissa"


@dataclass(frozen=True)
class Pissa(OnLinears):
    """Which Linears of the blocks have it, and how many singular values each."""

    key: ClassVar[str] = KEY
    rank: int = setting(16, "singular values of each weight that are trained", least=1)
    alpha: float = setting(16.0, "the update counts alpha / rank", least=1e-6)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)
    rank_stabilised: bool = setting(False, "the update counts alpha / sqrt(rank) instead")

    def beside(self, name: str, one: Weighed) -> Principal:
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return Principal(one, self.rank, scale(self.alpha, self.rank, self.rank_stabilised))

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        """Of as many again, that count as much each."""
        count = scale(self.alpha, self.rank, self.rank_stabilised)
        own = {**said(self), "r": 2 * self.rank, "lora_alpha": count * 2 * self.rank}
        return stored(FORMAT, adapted, {**own, "use_rslora": False})


class Principal(nn.Module):
    """W x + scale (B A + B0 A0) x, beside a Linear of weight W; B0 A0 begins as -B A, and stays."""

    enters = False
    begins = ("a.weight", "b.weight", "a0.weight", "b0.weight")
    room = 4  # the weight and its singular vectors

    def __init__(self, one: Weighed, rank: int, scale: float) -> None:
        super().__init__()
        d_out, d_in = one.sizes
        a = Declared(Initial(), along_input(one, 1), "lora_A.weight", joined=0)
        b = Declared(Initial(), along_output(one, 0), "lora_B.weight", joined=1)
        self.a, self.b = Factor((d_in, rank), a), Factor((rank, d_out), b)
        self.a0, self.b0 = Factor((d_in, rank), a), Factor((rank, d_out), b)
        for factor in (self.a0, self.b0):
            factor.weight.requires_grad_(False)
        self.scale = scale

    def begin(self, weight: Tensor) -> dict[str, Tensor]:
        """The square root of each singular value is in both factors."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        u, values, v = torch.linalg.svd(weight.to(wide), full_matrices=False)
        rank = self.a.weight.shape[0]
        root = (values[:rank] / self.scale).sqrt()
        a, b = root[:, None] * v[:rank], u[:, :rank] * root
        return {"a.weight": a, "b.weight": b, "a0.weight": a, "b0.weight": -b}

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        plain = one.plain(x)
        update: Tensor = self.b(self.a(x) * self.scale) + self.b0(self.a0(x) * self.scale)
        return plain + update

    def merged(self, weight: Tensor) -> Tensor:
        pairs = ((self.b, self.a), (self.b0, self.a0))
        for b, a in pairs:
            weight = weight + b.weight.to(weight.dtype) @ a.weight.to(weight.dtype) * self.scale
        return weight

    def shift(self, bias: Tensor) -> Tensor:
        return bias


technique(KEY, Pissa, "trains what the largest singular values make of each frozen weight")
