"""Low-rank adapters that keep a pruned weight's zeros: W + scale (B A) * (W != 0).

Zimmer et al., "PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs", 2023: MaskLoRA. A
and B begin as those of an adapter without the mask. What was zero changes nothing while it is
trained, so the merged weight computes the same and has the zeros.

The change is made for a product and again for its gradients; nothing of its size is kept between.
On a tensor axis B of a column weight and A of a row weight are cut as it is, and a worker masks by
its own part of the weight. peft has no such adapter: in files A and B have its usual names, under a
peft_type of our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.adapter import (
    FORMATS,
    OWN,
    Adapted,
    Naming,
    Weighed,
    along_input,
    along_output,
)
from outsize.models.declared import Declared, Initial
from outsize.models.linear import Linear
from outsize.models.targets import (
    ALL,
    TARGETS,
    OnLinears,
    check_rank,
    number,
    refuse_others,
    stored,
)
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.masked_lora", f"{OWN}MASKED_LORA"


@dataclass(frozen=True)
class MaskedLora(OnLinears):
    """Which Linears of the blocks have it, and the rank of what is masked."""

    key: ClassVar[str] = KEY
    rank: int = setting(16, "rank of the update of each weight before its zeros are kept", least=1)
    alpha: float = setting(32.0, "the update counts alpha / rank", least=1e-6)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)

    def beside(self, name: str, one: Weighed) -> Masked:
        """What a linear layer of this name has beside it. OutsizeError for one that is coded."""
        check_rank(f"{KEY}.rank", self.rank, name, one)
        if isinstance(one, Linear) and one.coded is not None:
            raise OutsizeError(
                f"{KEY}: {name} is held as {one.coded.format.name}, into which no change is merged;"
                " expected weights whose zeros are kept: leave out the key weights, or take another"
                " adapter"
            )
        return Masked(one, self.rank, self.alpha / self.rank)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return stored(FORMAT, adapted, {"r": self.rank, "lora_alpha": self.alpha})


class Masked(nn.Module):
    """W x + scale ((B A) * (W != 0)) x, beside a Linear of weight W. a: (rank, d_in), b: (d_out,
    rank)."""

    enters = False

    def __init__(self, one: Weighed, rank: int, scale: float) -> None:
        super().__init__()
        (d_out, d_in), self.scale = one.sizes, scale
        self.a = nn.Parameter(torch.empty(rank, d_in))
        self.b = nn.Parameter(torch.empty(d_out, rank))
        start = Initial(bound=1 / math.sqrt(d_in))  # kaiming_uniform_ with a = sqrt(5)
        self.declared = {
            "a": Declared(start, along_input(one, 1), "lora_A.weight"),
            "b": Declared(Initial(), along_output(one, 0), "lora_B.weight"),
        }

    def declare(self, leaf: str) -> Declared:
        return self.declared[leaf]

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        plain = one.plain(x)
        update: Tensor = _Update.apply(x, one, self.scale, self.a, self.b)  # type: ignore[no-untyped-call]
        return plain + update

    def merged(self, weight: Tensor) -> Tensor:
        return weight + _kept(self.b.to(weight.dtype) @ self.a.to(weight.dtype), weight, self.scale)

    def shift(self, bias: Tensor) -> Tensor:
        return bias


class _Update(torch.autograd.Function):
    # The Linear is held and not its weight, which may lie elsewhere between the passes.
    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Weighed, scale: float, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.one, ctx.scale = one, scale
        return F.linear(x, _kept(b @ a, one.matrix(), scale))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        weight = ctx.one.matrix()
        gx = gy @ _kept(b @ a, weight, ctx.scale) if ctx.needs_input_grad[0] else None
        gy_TO, x_TI = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
        change = _kept(gy_TO.t() @ x_TI, weight, ctx.scale)
        return gx, None, None, b.t() @ change, change @ a.t()


def _kept(change: Tensor, weight: Tensor, scale: float) -> Tensor:
    """scale * change, zero where the weight is; in the place of `change`."""
    return change.masked_fill_(weight == 0, 0.0).mul_(scale)


def read(found: Mapping[str, Any], naming: Naming) -> MaskedLora:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    refuse_others(found, {})
    targets = naming(found)
    return MaskedLora(number(found, "r"), number(found, "lora_alpha", float), targets)


FORMATS.add(FORMAT, read)
technique(KEY, MaskedLora, "trains an update of low rank of each pruned weight, zeros stay")
