"""Blocks of codes to numbers: value of each code times the scale of its group, in one pass.

N blocks of B bytes, G codes of a group.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outsize.kernels import native

# "bytes": signed codes of 8 bits; of 4 bits "halves": the first half of a group in the lower bits,
# "pairs": neighbours in a byte, the first in its upper bits.
Order = Literal["bytes", "halves", "pairs"]
_ORDERS: dict[str, int] = {"bytes": 0, "halves": 1, "pairs": 2}


class Laid(NamedTuple):
    """Blocks and what their codes stand for. scales: float32; table: the values of 16 codes,
    float32, where these have 4 bits; head: bytes before a block's codes."""

    blocks_NB: Tensor
    scales_N1: Tensor
    table: Tensor | None
    order: Order
    head: int

    @property
    def number(self) -> int:
        """Of the order, as codes.cpp counts them."""
        return _ORDERS[self.order]

    @property
    def ready(self) -> bool:
        """Whether codes.cpp reads them where they lie."""
        alike = self.blocks_NB.is_contiguous() and self.scales_N1.is_contiguous()
        return alike and self.blocks_NB.is_cpu


def decoded(laid: Laid, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, G) in `dtype`, each a product in float32 that is rounded once."""
    blocks_NB, scales_N1, table, order, head = laid
    like = scales_N1 if dtype == torch.float32 else scales_N1.new_empty(0, dtype=dtype)
    if laid.ready and native.reads(scales_N1, like):
        given = scales_N1 if table is None else table
        y: Tensor = torch.ops.outsize.decode.default(
            blocks_NB, scales_N1, given, laid.number, head, dtype
        )
        return y
    return plain(blocks_NB, scales_N1, table, order, head).to(dtype)


def plain(
    blocks_NB: Tensor, scales_N1: Tensor, table: Tensor | None, order: Order, head: int
) -> Tensor:
    """The twin of outsize_decode, in float32."""
    codes = blocks_NB[:, head:]
    if table is None:
        return codes.contiguous().view(torch.int8).to(torch.float32).mul_(scales_N1)
    upper, lower = codes >> 4, codes & 15
    if order == "halves":
        names = torch.cat((lower, upper), -1)
    else:
        names = torch.stack((upper, lower), -1).flatten(1)
    values = table.index_select(0, names.flatten().to(torch.int32))
    return values.view(len(blocks_NB), -1).mul_(scales_N1)


def _allocate(
    blocks: Tensor, scales: Tensor, table: Tensor, order: int, head: int, dtype: torch.dtype
) -> Tensor:
    group = (blocks.shape[1] - head) * (1 if order == 0 else 2)
    return torch.empty(blocks.shape[0], group, dtype=dtype, device=blocks.device)


def _run(
    blocks: Tensor, scales: Tensor, table: Tensor, order: int, head: int, dtype: torch.dtype
) -> Tensor:
    y = _allocate(blocks, scales, table, order, head, dtype)
    native.loaded().outsize_decode(
        *(native.CODES[dtype], order, blocks.data_ptr(), scales.data_ptr(), table.data_ptr()),
        *(y.data_ptr(), *y.shape, blocks.shape[1], head, native.threads()),
    )
    return y


_OPERATORS = (
    native.define(
        "decode(Tensor blocks, Tensor scales, Tensor table, int order, int head, ScalarType dtype)"
        " -> Tensor",
        _run,
        _allocate,
    ),
)
