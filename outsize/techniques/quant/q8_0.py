"""llama.cpp's Q8_0: 32 weights in 8 bits with a float16 scale, byte for byte as GGUF files have it.

weights: q8_0            # in a run's file
outsize export DIR --to gguf:Q8_0 --into model.gguf
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels.codes import Laid
from outsize.models.coding import FORMATS, Blocks, groups_of, numbers, raw

NAME, GROUP = "q8_0", 32


def pack(groups_NG: Tensor) -> Tensor:
    scale_N1 = groups_NG.abs().amax(-1, keepdim=True) / 127
    scaled_NG = groups_NG * torch.where(scale_N1 == 0, 0.0, 1 / scale_N1)
    whole_NG = scaled_NG.abs().add_(0.5).floor_() * scaled_NG.sign()  # halves go from zero
    return torch.cat((raw(scale_N1, torch.float16), whole_NG.to(torch.int8).view(torch.uint8)), -1)


def laid(blocks_NB: Tensor) -> Laid:
    return Laid(blocks_NB, torch.float16, None, "bytes", 2)


def scales(blocks_NB: Tensor) -> Tensor:
    return numbers(blocks_NB[:, :2], torch.float16)


def made(size: int | None) -> Blocks:
    return Blocks(NAME, groups_of(size, GROUP, (GROUP,), NAME), 34, pack, scales, laid, whole=True)


FORMATS.add(NAME, made)
