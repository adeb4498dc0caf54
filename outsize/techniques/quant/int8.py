"""Weights in 8 bits: each group has the scale of its largest magnitude, as bfloat16.

weights: int8            # in a run's file; groups of 64, or int8:32, int8:128
outsize.load(DIR, weights="int8")
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels.codes import Laid, encoded
from outsize.models.coding import FORMATS, Blocks, groups_of, numbers, over, raw, spelled

NAME, GROUP, GROUPS = "int8", 64, (16, 32, 64, 128, 256)
_MOST = 127


def pack(groups_NG: Tensor) -> Tensor:
    return encoded(groups_NG, "bytes", plainly)


def plainly(groups_NG: Tensor) -> Tensor:
    scale_N2 = raw(groups_NG.abs().amax(-1, keepdim=True) / _MOST, torch.bfloat16)
    codes_NG = over(groups_NG, scales(scale_N2)).round_().clamp_(-_MOST, _MOST)
    return torch.cat((scale_N2, codes_NG.to(torch.int8).view(torch.uint8)), -1)


def laid(blocks_NB: Tensor) -> Laid:
    return Laid(blocks_NB, torch.bfloat16, None, "bytes", 2)


def scales(blocks_NB: Tensor) -> Tensor:
    return numbers(blocks_NB[:, :2], torch.bfloat16)


def made(size: int | None) -> Blocks:
    group = groups_of(size, GROUP, GROUPS, NAME)
    return Blocks(spelled(NAME, group, GROUP), group, 2 + group, pack, scales, laid, whole=True)


FORMATS.add(NAME, made)
