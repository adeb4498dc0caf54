"""Weights in 4 bits: 16 even steps around zero, the lowest of which is the group's number of
largest magnitude, whatever its sign; so all 16 codes are used. The scale is a bfloat16.

    weights: int4            # in a run's file; groups of 64, or int4:32, int4:128
    outsize.load(DIR, weights="int4")
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels.codes import Laid, encoded, farthest
from outsize.models.coding import (
    FORMATS,
    Blocks,
    groups_of,
    halves,
    numbers,
    over,
    raw,
    spelled,
)

NAME, GROUP, GROUPS = "int4", 64, (16, 32, 64, 128, 256)
ZERO = 8  # the code of 0


def pack(groups_NG: Tensor) -> Tensor:
    return encoded(groups_NG, "halves", plainly)


def plainly(groups_NG: Tensor) -> Tensor:
    largest = farthest(groups_NG)
    scale_N2 = raw(largest / -ZERO, torch.bfloat16)
    codes_NG = over(groups_NG, scales(scale_N2)).add_(ZERO).round_().clamp_(0, 15)
    return torch.cat((scale_N2, halves(codes_NG.to(torch.uint8))), -1)


def laid(blocks_NB: Tensor) -> Laid:
    return Laid(blocks_NB, torch.bfloat16, None, "halves", 2)


def scales(blocks_NB: Tensor) -> Tensor:
    return numbers(blocks_NB[:, :2], torch.bfloat16)


def made(size: int | None) -> Blocks:
    group = groups_of(size, GROUP, GROUPS, NAME)
    return Blocks(
        spelled(NAME, group, GROUP), group, 2 + group // 2, pack, scales, laid, whole=True
    )


FORMATS.add(NAME, made)
