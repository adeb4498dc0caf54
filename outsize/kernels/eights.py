"""Products of rows that are rounded to 8 bits by codes that are whole numbers: eights.cpp.

As many numbers of a row as a scale of the weight is for become whole numbers of -127 to 127 and one
scale (Yao et al., "ZeroQuant", 2022, which has one for each token; groups keep an outlier to
itself). Sums of a group are whole and exact; those of groups are added in their order, each
multiplied by the row's scale, then by the weight's, and rounded each time: any processor gives the
same bits, for a row in any company.

With outliers apart (Dettmers et al., "LLM.int8()", 2022), numbers of a magnitude of OUTLIER or more
are left out of that, and multiplied as they are by what codes stand for: one after another in their
order, each product and each sum rounded, and the whole added to the other. The paper takes a
feature apart where any token of the batch has an outlier; here a token's are its own, and its
numbers depend on no other.

Where workers have parts of each row, and a scale is the whole row's, they agree on the largest
magnitude before: T numbers of float32, the largest over all of them.

T rows, I inputs, O outputs, G groups, E numbers of a group, S groups of a scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import native, rows
from outsize.kernels.codes import Laid, decoded, whole
from outsize.kernels.rows import Rounding

MOST = 127
Agree = Callable[[Tensor], Tensor]  # on the largest of everybody's numbers, in place
OUTLIER = 6.0  # of the paper: from that magnitude on
_LEAST = 1e-30  # magnitudes below which a group is none


def linear(
    x: Tensor,
    laid: Laid,
    outputs: int,
    bias_O: Tensor | None,
    rounding: Rounding = "+a8",
    agree: Agree | None = None,
) -> Tensor:
    """x (..., I), rounded, times the weight that blocks of codes stand for, plus bias: (..., O).
    agree: of a part of rows whose scale is the whole row's. OutsizeError where a gradient is asked
    for."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise OutsizeError(
            f"weights: {rounding} rounds what weights are multiplied by, which has no gradient;"
            f" leave {rounding} out, or call the model under torch.no_grad()"
        )
    with torch.no_grad():
        most_T = None if agree is None else agree(largest(x.reshape(-1, x.shape[-1]), rounding))
        if native.served(x) and laid.ready:
            return rows.by_codes(x, laid, outputs, bias_O, rounding, most_T)
        y_TO = plain(x.reshape(-1, x.shape[-1]), laid, outputs, bias_O, rounding, most_T)
        return y_TO.view(*x.shape[:-1], outputs)


def pack(laid: Laid, outputs: int) -> bool:
    """Have the weight lie in its place as products read it best, by runs of PANEL outputs; False
    where they read it best as it lies. What holds it is to say from then on that it is packed."""
    if not (laid.ready and native.lies(laid.blocks_NB)) or laid.packed:
        return False
    inner = len(laid.blocks_NB) * laid.group // outputs
    weight = laid.matrix(inner, None, "+a8")
    return bool(native.loaded().outsize_eights_pack(weight.address, native.threads()))


def plain(
    x_TI: Tensor,
    laid: Laid,
    outputs: int,
    bias_O: Tensor | None,
    rounding: Rounding = "+a8",
    most_T: Tensor | None = None,
) -> Tensor:
    """The twin of outsize_eights_product."""
    codes_NE, scales_N1 = whole(laid)
    codes_OGE = codes_NE.view(outputs, -1, codes_NE.shape[-1])
    scales_OG = scales_N1.view(outputs, -1)
    wide_TI = x_TI.to(torch.promote_types(x_TI.dtype, torch.float32))
    apart_TI = outliers(wide_TI) if rounding == "+outliers" else torch.zeros_like(wide_TI)
    x_TGE, sizes_TG1 = _groups_of(wide_TI - apart_TI, codes_OGE.shape[2], laid.every, most_T)
    y_TO = x_TGE.new_zeros(len(x_TI), outputs)
    for g in range(codes_OGE.shape[1]):  # sums are below 2^24, and exact in any order
        sums_TO = x_TGE[:, g] @ codes_OGE[:, g].to(x_TGE.dtype).T
        y_TO += sums_TO * sizes_TG1[:, g] * scales_OG[:, g]
    if rounding == "+outliers":
        y_TO += _product_of_outliers(apart_TI, laid, outputs)
    return (y_TO if bias_O is None else y_TO + bias_O.to(x_TI.dtype)).to(x_TI.dtype)


def outliers(x: Tensor) -> Tensor:
    """The numbers that are taken apart, 0 in the place of others; those that are not finite make
    all that they are rounded with NaN."""
    return torch.where((x.abs() >= OUTLIER) & x.isfinite(), x, 0.0)


def _product_of_outliers(apart_TI: Tensor, laid: Laid, outputs: int) -> Tensor:
    """(T, O). A product by 0 changes no bit of a sum that begins as 0."""
    weight_OI = decoded(laid).view(outputs, -1).to(apart_TI.dtype)
    y_TO = apart_TI.new_zeros(len(apart_TI), outputs)
    for i in apart_TI.any(0).nonzero().flatten().tolist():
        y_TO += apart_TI[:, i : i + 1] * weight_OI[:, i]
    return y_TO


def largest(x_TI: Tensor, rounding: Rounding) -> Tensor:
    """most_T of each row, but for what is taken apart, at least float32; of rows that are not all
    finite infinite: a NaN need not survive a comparison with other workers' numbers."""
    left_TI = x_TI.abs()
    if rounding == "+outliers":
        left_TI.masked_fill_((left_TI >= OUTLIER) & left_TI.isfinite(), 0.0)
    most_T = left_TI.amax(-1)
    return most_T.to(torch.promote_types(x_TI.dtype, torch.float32)).nan_to_num_(nan=torch.inf)


def _groups_of(x_TI: Tensor, size: int, every: int, most_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounded numbers (T, G, E) and, of each group, its scale (T, G, 1)."""
    most_T11 = None if most_T is None else most_T[:, None, None]
    x_TSE, sizes_TS1 = rounded(x_TI.unflatten(-1, (-1, every * size)), most_T11)
    return x_TSE.reshape(len(x_TI), -1, size), sizes_TS1.repeat_interleave(every, 1)


def rounded(x: Tensor, most: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Groups (..., E) as whole numbers, and their scales (..., 1): of numbers that are not all
    finite, NaN. most: the magnitudes that scales are of; None: the largest of each group."""
    most = x.abs().amax(-1, keepdim=True) if most is None else most
    finite = most.isfinite()
    some = finite & (most >= _LEAST)
    # `MOST / most` would be a reciprocal, rounded, times MOST.
    inverse = torch.full_like(most, MOST).div_(most)
    found = torch.where(some, (x * inverse).round(), 0.0)
    return found, torch.where(some, most / MOST, torch.where(finite, 0.0, torch.nan))
