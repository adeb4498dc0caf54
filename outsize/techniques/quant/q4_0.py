"""llama.cpp's Q4_0: 32 weights in 4 bits with a float16 scale, byte for byte as GGUF files have it.

weights: q4_0            # in a run's file
outsize export DIR --to gguf:Q4_0 --into model.gguf
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels.codes import Laid, farthest
from outsize.models.coding import FORMATS, Blocks, groups_of, halves, numbers, raw

NAME, GROUP = "q4_0", 32


def pack(groups_NG: Tensor) -> Tensor:
    largest_N1 = farthest(groups_NG)
    scale_N1 = largest_N1 / -8
    scaled_NG = groups_NG * torch.where(scale_N1 == 0, 0.0, 1 / scale_N1)
    codes_NG = scaled_NG.add_(8.5).trunc_().clamp_(0, 15).to(torch.uint8)
    return torch.cat((raw(scale_N1, torch.float16), halves(codes_NG)), -1)


def laid(blocks_NB: Tensor) -> Laid:
    return Laid(blocks_NB, torch.float16, None, "halves", 2)


def scales(blocks_NB: Tensor) -> Tensor:
    return numbers(blocks_NB[:, :2], torch.float16)


def made(size: int | None) -> Blocks:
    return Blocks(NAME, groups_of(size, GROUP, (GROUP,), NAME), 18, pack, scales, laid, whole=True)


FORMATS.add(NAME, made)
