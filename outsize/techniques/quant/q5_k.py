"""llama.cpp's Q5_K: 256 weights in eight parts of 32, each with a scale and a minimum of 6 bits,
laid out as GGUF files have it.

    weights: q5_k            # in a run's file
    outsize export DIR --to gguf:Q5_K --into model.gguf

The fifth bits of eight parts lie in the eight bits of 32 bytes.

N blocks, P = 8 parts of a block, E = 32 weights of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.models.coding import FORMATS, Blocks, groups_of
from outsize.models.superblocks import GROUP, HEAD, PARTS, halved, in_parts, scales, values

NAME, BLOCK = "q5_k", 176
_HIGH = GROUP // PARTS  # bytes of fifth bits


def pack(groups_NG: Tensor) -> Tensor:
    head_NB, codes_NPE = in_parts(groups_NG, 31)
    fifth_NE = sum((codes_NPE[:, part] >> 4) << part for part in range(PARTS))
    assert isinstance(fifth_NE, Tensor)
    pairs = (codes_NPE & 15).view(-1, PARTS // 2, 2, GROUP // PARTS)
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return torch.cat((head_NB, fifth_NE, packed.flatten(1)), -1)


def unpack(blocks_NB: Tensor, dtype: torch.dtype) -> Tensor:
    fifth_N1E = blocks_NB[:, HEAD : HEAD + _HIGH].unsqueeze(1)
    parts_P1 = torch.arange(PARTS, dtype=torch.uint8, device=blocks_NB.device).unsqueeze(-1)
    high_NPE = ((fifth_N1E >> parts_P1) & 1) << 4
    return values(blocks_NB, halved(blocks_NB[:, HEAD + _HIGH :]) | high_NPE, dtype)


def made(size: int | None) -> Blocks:
    return Blocks(NAME, groups_of(size, GROUP, (GROUP,), NAME), BLOCK, pack, scales, unpack=unpack)


FORMATS.add(NAME, made)
