"""llama.cpp's Q4_K: 256 weights in eight parts of 32, each with a scale and a minimum of 6 bits,
laid out as GGUF files have it.

    weights: q4_k            # in a run's file
    outsize export DIR --to gguf:Q4_K --into model.gguf

Scales and minima are those of each part's range; llama.cpp searches on from there, so that its
codes differ, and what they decode to does not.

N blocks, P = 8 parts of a block, E = 32 weights of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.models.coding import FORMATS, Blocks, groups_of
from outsize.models.superblocks import GROUP, HEAD, PARTS, halved, in_parts, scales, values

NAME, BLOCK = "q4_k", 144


def pack(groups_NG: Tensor) -> Tensor:
    head_NB, codes_NPE = in_parts(groups_NG, 15)
    pairs = codes_NPE.view(-1, PARTS // 2, 2, GROUP // PARTS)
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return torch.cat((head_NB, packed.flatten(1)), -1)


def unpack(blocks_NB: Tensor, dtype: torch.dtype) -> Tensor:
    return values(blocks_NB, halved(blocks_NB[:, HEAD:]), dtype)


def made(size: int | None) -> Blocks:
    return Blocks(NAME, groups_of(size, GROUP, (GROUP,), NAME), BLOCK, pack, scales, unpack=unpack)


FORMATS.add(NAME, made)
