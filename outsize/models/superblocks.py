"""Blocks of 256 weights in eight parts of 32, each with a scale and a minimum of 6 bits, as ggml
has them: what formats of such blocks share, whatever bits their codes have.

N blocks, P = 8 parts of a block, E = 32 weights of a part, B bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.models.coding import numbers, over, raw

GROUP = 256
PARTS, HEAD = 8, 4 + 12  # bytes before the codes: two float16, scales and minima
_MOST = 63


def in_parts(groups_NG: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The bytes that parts' scales and minima take, and codes_NPE, 0 to `most`."""
    w_NPE = groups_NG.view(-1, PARTS, GROUP // PARTS)
    lowest_NP = w_NPE.amin(-1).clamp_(max=0)
    ranges_NP = (w_NPE.amax(-1).clamp_(min=0) - lowest_NP) / most
    both = (ranges_NP, -lowest_NP)
    heads = [raw(one.amax(-1, keepdim=True) / _MOST, torch.float16) for one in both]
    wide = [numbers(head, torch.float16) for head in heads]
    six = [
        over(x, d).round_().clamp_(0, _MOST).to(torch.uint8)
        for x, d in zip(both, wide, strict=True)
    ]
    step_NP, least_NP = (d * x.to(torch.float32) for d, x in zip(wide, six, strict=True))
    codes_NPE = over(w_NPE + least_NP.unsqueeze(-1), step_NP.unsqueeze(-1)).round_()
    codes_NPE = codes_NPE.clamp_(0, most).to(torch.uint8)
    return torch.cat((*heads, _six_bits(*six)), -1), codes_NPE


def halved(packed_NB: Tensor) -> Tensor:
    """codes_NPE of 4 bits, two parts in the halves of each run of bytes."""
    packed = packed_NB.view(-1, PARTS // 2, 1, GROUP // PARTS)
    return torch.cat((packed & 15, packed >> 4), 2).view(-1, PARTS, GROUP // PARTS)


def values(blocks_NB: Tensor, codes_NPE: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes stand for by the scales and minima of their blocks."""
    wide_N2 = scales(blocks_NB)
    steps_NP, lowest_NP = _from_six_bits(blocks_NB[:, 4:HEAD])
    step_NP1 = (wide_N2[:, :1] * steps_NP).unsqueeze(-1)
    least_NP1 = (wide_N2[:, 1:] * lowest_NP).unsqueeze(-1)
    return codes_NPE.to(torch.float32).mul_(step_NP1).sub_(least_NP1).flatten(1).to(dtype)


def _six_bits(steps_NP: Tensor, lowest_NP: Tensor) -> Tensor:
    """Sixteen numbers of 6 bits in 12 bytes: the first four of each whole in theirs, of the others
    the upper two bits above these."""
    (a, b), (c, d) = steps_NP.chunk(2, -1), lowest_NP.chunk(2, -1)
    upper = [first | (second >> 4 << 6) for first, second in ((a, b), (c, d))]
    return torch.cat((*upper, (b & 15) | (d << 4)), -1)


def _from_six_bits(bytes_N12: Tensor) -> tuple[Tensor, Tensor]:
    first, second, lower = bytes_N12.chunk(3, -1)
    steps = torch.cat((first & 63, (lower & 15) | (first >> 6 << 4)), -1)
    lowest = torch.cat((second & 63, (lower >> 4) | (second >> 6 << 4)), -1)
    return steps.to(torch.float32), lowest.to(torch.float32)


def scales(blocks_NB: Tensor) -> Tensor:
    return numbers(blocks_NB[:, :4], torch.float16)
