"""Weights in 8 bits, of which all that make one output share the scale of their largest magnitude.

Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022, section
2.2: with +a8 behind it what is multiplied has one scale a token too, and with +outliers the
token's numbers of great magnitude, which would be that scale, are taken apart (kernels/eights.py).

    outsize serve DIR --weights int8-rows+outliers

A block has codes alone: where a row may be cut, and in what pieces its sums are added. Scales
(float32) are the weight's, and whole on every worker.

O outputs, I inputs, R bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.kernels.codes import Laid
from outsize.models.coding import (
    FORMATS,
    Format,
    Grid,
    groups_of,
    numbers,
    over,
    pieces,
    raw,
    spelled,
)

NAME, GROUP, GROUPS = "int8-rows", 64, (16, 32, 64, 128, 256)
_MOST = 127


@dataclass(frozen=True)
class RowScaled(Format):
    """The Format. Scales are counted among its bytes, not in its bits."""

    group: int = GROUP
    whole: bool = True
    bits: float = 8.0

    @property
    def name(self) -> str:
        return spelled(NAME, self.group, GROUP)

    @property
    def block(self) -> int:
        return self.group

    def shared(self, rows: int, stride: int) -> int:
        return torch.float32.itemsize * rows

    def encode(self, weight_OI: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, inputs = weight_OI.shape
        codes = torch.empty(rows, inputs, dtype=torch.int8, device=weight_OI.device)
        scales = torch.empty(rows, 1, dtype=torch.float32, device=weight_OI.device)
        for first, last in pieces(rows, inputs):
            here = weight_OI[first:last].to(torch.float32)
            scale = scales[first:last] = here.abs().amax(-1, keepdim=True) / _MOST
            codes[first:last] = over(here, scale).round_().clamp_(-_MOST, _MOST)
        return codes.view(torch.uint8), raw(scales.flatten(), torch.float32)

    def laid(self, codes_OR: Tensor, shared: Tensor | None, grid: Grid) -> Laid:
        assert shared is not None, "its scales"
        rows, stride = len(codes_OR), codes_OR.shape[1] // self.group
        scales = numbers(shared, torch.float32)[grid.row : grid.row + rows].view(-1, 1)
        return Laid(codes_OR.reshape(-1, self.group), scales, None, "bytes", 0, stride)


def made(size: int | None) -> RowScaled:
    return RowScaled(groups_of(size, GROUP, GROUPS, NAME))


FORMATS.add(NAME, made)
