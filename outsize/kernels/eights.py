"""Products of rows that are rounded to 8 bits by codes that are whole numbers: eights.cpp.

Each group of a row, as long as the weight's own, becomes whole numbers of -127 to 127 and one scale
(Yao et al., "ZeroQuant", 2022, which has one for each token; groups keep an outlier to
itself). Sums of a group are whole and exact; those of groups are added in their order, each
multiplied by the row's scale, then by the weight's, and rounded each time: any processor gives the
same bits, for a row in any company.

T rows, I inputs, O outputs, G groups, E numbers of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import native, rows
from outsize.kernels.codes import Laid, whole

MOST = 127
_LEAST = 1e-30  # magnitudes below which a group is none


def linear(x: Tensor, laid: Laid, outputs: int, bias_O: Tensor | None) -> Tensor:
    """x (..., I), rounded, times the weight that blocks of codes stand for, plus bias: (..., O).
    OutsizeError where a gradient is asked for."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise OutsizeError(
            "weights: +a8 rounds what weights are multiplied by, which has no gradient; leave +a8"
            " out, or call the model under torch.no_grad()"
        )
    with torch.no_grad():
        if native.served(x) and laid.ready:
            return rows.by_codes(x, laid, outputs, bias_O, eights=True)
        y_TO = plain(x.reshape(-1, x.shape[-1]), laid, outputs, bias_O)
        return y_TO.view(*x.shape[:-1], outputs)


def plain(x_TI: Tensor, laid: Laid, outputs: int, bias_O: Tensor | None) -> Tensor:
    """The twin of outsize_eights_product."""
    codes_NE, scales_N1 = whole(laid)
    codes_OGE = codes_NE.view(outputs, -1, codes_NE.shape[-1])
    scales_OG = scales_N1.view(outputs, -1)
    wide_TI = x_TI.to(torch.promote_types(x_TI.dtype, torch.float32))
    x_TGE, sizes_TG1 = rounded(wide_TI.unflatten(-1, codes_OGE.shape[1:]))
    y_TO = x_TGE.new_zeros(len(x_TI), outputs)
    for g in range(codes_OGE.shape[1]):  # sums are below 2^24, and exact in any order
        sums_TO = x_TGE[:, g] @ codes_OGE[:, g].to(x_TGE.dtype).T
        y_TO += sums_TO * sizes_TG1[:, g] * scales_OG[:, g]
    return (y_TO if bias_O is None else y_TO + bias_O.to(x_TI.dtype)).to(x_TI.dtype)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups (..., E) as whole numbers, and their scales (..., 1): of numbers that are not all
    finite, NaN."""
    most = x.abs().amax(-1, keepdim=True)
    finite = most.isfinite()
    some = finite & (most >= _LEAST)
    # `MOST / most` would be a reciprocal, rounded, times MOST.
    inverse = torch.full_like(most, MOST).div_(most)
    found = torch.where(some, (x * inverse).round(), 0.0)
    return found, torch.where(some, most / MOST, torch.where(finite, 0.0, torch.nan))
