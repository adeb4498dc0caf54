"""llama.cpp's Q6_K: 256 weights in sixteen parts of 16, each with a scale of 8 bits, laid out as
GGUF files have it.

    weights: q6_k            # in a run's file
    outsize export DIR --to gguf:Q6_K --into model.gguf

A part's scale is its largest weight's; llama.cpp searches on from there, so that its codes differ,
and what they decode to does not.

N blocks, P = 16 parts of a block, E = 16 weights of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.kernels.codes import farthest
from outsize.models.coding import FORMATS, Blocks, groups_of, numbers, over, raw

NAME, GROUP, BLOCK = "q6_k", 256, 210
PARTS = 16
_LOW, _HIGH = 128, 64  # bytes of the lower four bits, and of the upper two
_SHIFTS = (0, 2, 4, 6)  # of these, by quarter of 128 weights


def pack(groups_NG: Tensor) -> Tensor:
    w_NPE = groups_NG.view(-1, PARTS, GROUP // PARTS)
    step_NP = farthest(w_NPE).squeeze(-1) / -32
    wide_N2 = raw(farthest(step_NP) / -128, torch.float16)
    step8_NP = over(step_NP, numbers(wide_N2, torch.float16)).round_().clamp_(-128, 127)
    whole_NP1 = (numbers(wide_N2, torch.float16) * step8_NP).unsqueeze(-1)
    codes_NPE = over(w_NPE, whole_NP1).round_().clamp_(-32, 31).add_(32).to(torch.uint8)
    quarters = codes_NPE.view(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | ((quarters[:, :, 2:] & 15) << 4)
    upper = [(quarters[:, :, i] >> 4) << shift for i, shift in enumerate(_SHIFTS)]
    high = upper[0] | upper[1] | upper[2] | upper[3]
    eight_NP = step8_NP.to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(1), high.flatten(1), eight_NP, wide_N2), -1)


def unpack(blocks_NB: Tensor, dtype: torch.dtype) -> Tensor:
    low = blocks_NB[:, :_LOW].view(-1, 2, 2, 32)
    high = blocks_NB[:, _LOW : _LOW + _HIGH].view(-1, 2, 1, 32)
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=blocks_NB.device).view(4, 1)
    quarters = torch.cat((low & 15, low >> 4), 2) | (((high >> shifts) & 3) << 4)
    eight_NP = blocks_NB[:, _LOW + _HIGH : -2].contiguous().view(torch.int8)
    step_NP1 = (scales(blocks_NB) * eight_NP.to(torch.float32)).unsqueeze(-1)
    codes_NPE = quarters.to(torch.float32).sub_(32).view(-1, PARTS, GROUP // PARTS)
    return codes_NPE.mul_(step_NP1).flatten(1).to(dtype)


def scales(blocks_NB: Tensor) -> Tensor:
    return numbers(blocks_NB[:, -2:], torch.float16)


def made(size: int | None) -> Blocks:
    return Blocks(NAME, groups_of(size, GROUP, (GROUP,), NAME), BLOCK, pack, scales, unpack=unpack)


FORMATS.add(NAME, made)
