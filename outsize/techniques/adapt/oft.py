"""Weights that are turned: W R, where R is block-diagonal, and each block orthogonal but for
rounding of a series.

Qiu et al., "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", 2023; the series for
Cayley's transform (I + Q)(I - Q)^-1 of a skew Q: Qiu et al., "Orthogonal Finetuning Made Scalable",
2025. The input is turned, so W stays as it is. Files are peft's.

On a tensor axis each worker turns what it has of a row weight's input: whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.adapter import FORMATS, Adapted, Naming, Weighed, along_input
from outsize.models.declared import Declared, Initial
from outsize.models.targets import ALL, TARGETS, OnLinears, number, refuse_others, stored
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.oft", "OFT"
TERMS = 5  # of the series, as in peft
SERIES = "0.18.0"  # the first peft that has this one
OTHERS = {
    "r": 0, "module_dropout": 0.0, "bias": "none", "coft": False, "block_share": False,
    "use_cayley_neumann": True, "num_cayley_neumann_terms": TERMS,
}  # fmt: skip


@dataclass(frozen=True)
class Oft(OnLinears):
    """Which Linears of the blocks are turned, and how many features turn together."""

    key: ClassVar[str] = KEY
    block: int = setting(32, "features that turn together; divides what a weight takes", least=2)
    targets: tuple[str, ...] = setting((ALL,), TARGETS)

    def beside(self, name: str, one: Weighed) -> Turned:
        """What a linear layer of this name has beside it. OutsizeError where blocks do not fit."""
        if (d_in := one.sizes[1]) % self.block:
            raise OutsizeError(
                f"{KEY}.block: {self.block} does not divide the {d_in} features that {name} takes;"
                " expected a block that does"
            )
        return Turned(one, self.block)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {**OTHERS, "oft_block_size": self.block, "init_weights": True, "peft_version": SERIES}
        return stored(FORMAT, adapted, own)


class Turned(nn.Module):
    """W R x, beside a Linear of weight W. skew: (blocks, what is above the diagonal of each)."""

    enters = True

    def __init__(self, one: Weighed, block: int) -> None:
        super().__init__()
        self.block = block
        above = block * (block - 1) // 2
        self.skew = nn.Parameter(torch.empty(one.sizes[1] // block, above))
        self.lies = along_input(one, 0)

    def declare(self, _: str) -> Declared:
        return Declared(Initial(), self.lies, "oft_R.weight")

    def turns(self) -> Tensor:
        """(blocks, block, block): rows of an input are multiplied by them from the right."""
        size, device = self.block, self.skew.device
        row, column = torch.arange(size, device=device)[:, None], torch.arange(size, device=device)
        first, second = torch.minimum(row, column), torch.maximum(row, column)
        at = (first * (2 * size - first - 1)) // 2 + second - first - 1
        sign = (column - row).sign().to(self.skew.dtype)  # of the diagonal 0
        q = self.skew[:, at.clamp(min=0).flatten()].unflatten(1, (size, size)) * sign
        squared = q @ q
        cubed = squared @ q
        eye = torch.eye(size, dtype=q.dtype, device=device)
        turns: Tensor = 2 * (q + squared + cubed) + cubed @ q + eye
        return turns

    def forward(self, one: Weighed, x: Tensor) -> Tensor:
        parts = x.reshape(-1, x.shape[-1] // self.block, self.block)
        turned = (parts.transpose(0, 1) @ self.turns()).transpose(0, 1)
        return one.plain(turned.reshape(x.shape))

    def merged(self, weight: Tensor) -> Tensor:
        parts = weight.unflatten(1, (-1, self.block))
        turned = torch.einsum("ork,rck->orc", parts, self.turns().to(weight.dtype))
        return turned.flatten(1)

    def shift(self, bias: Tensor) -> Tensor:
        return bias


def read(found: Mapping[str, Any], naming: Naming) -> Oft:
    """The adapter that an adapter_config.json says. OutsizeError for what is not read here."""
    others = {**OTHERS, "r": found.get("r")} if found.get("oft_block_size") else OTHERS
    version = str(found.get("peft_version", "0")).split("@")[0].split(".")
    if [int(n) if n.isdecimal() else 0 for n in version[:2]] < [0, 18]:
        raise OutsizeError(
            f"adapter_config.json: peft_version is {found.get('peft_version')!r}; expected {SERIES}"
            " or later: before, OFT had another series"
        )
    refuse_others(found, others)
    return Oft(number(found, "oft_block_size"), naming(found))


FORMATS.add(FORMAT, read)
technique(KEY, Oft, "trains turns of what each frozen weight takes, in blocks")
