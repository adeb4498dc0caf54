"""Changes of high rank from few numbers: W + scale (B1 A1) * (B2 A2), element by element.

Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated
Learning", 2022; as an adapter in LyCORIS (Yeh et al., 2023) and peft, whose files these are.

The change is made for a product and again for its gradients; nothing of its size is kept between.
On a tensor axis both B of a column weight are cut as it is, and both A of a row weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.adapter import (
    FORMATS,
    Adapted,
    Adapter,
    Naming,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.declared import Declared, Initial, Lies
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

KEY, FORMAT = "adapt.loha", "LOHA"
OTHERS = {"rank_dropout": 0.0, "module_dropout": 0.0, "use_effective_conv2d": False}


@dataclass(frozen=True)
class Loha(OnLinears):
    """Which Linears of the blocks have it, and the rank of both factors."""

    key: ClassVar[str] = KEY
    rank: int = setting(8, "rank of both factors of the update of each weight", least=1)
    alpha: float = setting(8.0, "the update counts alpha / rank", least=1e-6)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)

    def beside(self, name: str, one: Weighed) -> Hadamard:
        check_rank(f"{KEY}.rank", self.rank, name, one)
        return Hadamard(one, self.rank, self.alpha / self.rank)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {"r": self.rank, "alpha": self.alpha, "init_weights": True, **OTHERS}
        return stored(FORMAT, adapted, own)


class Hadamard(nn.Module):
    """W x + scale ((B1 A1) * (B2 A2)) x, beside a Linear of weight W. a: (rank, d_in), b: (d_out,
    rank)."""

    enters = False

    def __init__(self, one: Weighed, rank: int, scale: float) -> None:
        super().__init__()
        (d_out, d_in), self.scale = one.sizes, scale
        self.b1, self.b2 = (nn.Parameter(torch.empty(d_out, rank)) for _ in range(2))
        self.a1, self.a2 = (nn.Parameter(torch.empty(rank, d_in)) for _ in range(2))
        self.output, self.input = along_output(one, 0), along_input(one, 1)

    def declare(self, leaf: str) -> Declared:
        """kaiming_uniform_ with a = sqrt(5) is uniform within 1 / sqrt(columns)."""
        lies: Lies = self.output if leaf[0] == "b" else self.input
        bound = 0.0 if leaf == "a2" else 1 / math.sqrt(self.get_parameter(leaf).shape[1])
        return Declared(
            Initial(bound=bound), lies, f"hada_w{leaf[1]}_{'a' if leaf[0] == 'b' else 'b'}"
        )

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        plain, factors = one.plain(x), (self.b1, self.a1, self.b2, self.a2)
        update: Tensor = _Update.apply(x, self.scale, *factors)  # type: ignore[no-untyped-call]
        return plain + update

    def merged(self, weight: Tensor) -> Tensor:
        b1, a1, b2, a2 = (p.to(weight.dtype) for p in (self.b1, self.a1, self.b2, self.a2))
        return weight + (b1 @ a1) * (b2 @ a2) * self.scale

    def shift(self, bias: Tensor) -> Tensor:
        return bias


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, b1: Tensor, a1: Tensor, b2: Tensor, a2: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, b1, a1, b2, a2)
        ctx.scale = scale
        return F.linear(x, (b1 @ a1) * (b2 @ a2) * scale)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, b1, a1, b2, a2 = ctx.saved_tensors
        one, two = b1 @ a1, b2 @ a2
        gx = gy @ (one * two * ctx.scale) if ctx.needs_input_grad[0] else None
        change = gy.flatten(0, -2).t() @ x.flatten(0, -2) * ctx.scale
        g1, g2 = change * two, change * one
        return gx, None, g1 @ a1.t(), b1.t() @ g1, g2 @ a2.t(), b2.t() @ g2


def read(found: Mapping[str, Any], naming: Naming) -> Adapter:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, OTHERS)
    return of_ranks(found, naming, "alpha", Loha)


FORMATS.add(FORMAT, read)
technique(KEY, Loha, "trains an update of each frozen weight, a product of two of low rank")
