"""Blocks of codes to numbers: value of each code times the scale of its group, in one pass; and the
number of a group that its scale is made of.

N blocks of B bytes, G codes of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.rows import ROUNDINGS, Matrix, Rounding, matrix
from outsize.torch_private import meta_kernels

# "bytes": signed codes of 8 bits; of 4 bits "halves": the first half of a group in the lower bits,
# "pairs": neighbours in a byte, the first in its upper bits.
Order = Literal["bytes", "halves", "pairs"]
_ORDERS: dict[Order, int] = {"bytes": 0, "halves": 1, "pairs": 2}
_NAMES = {number: order for order, number in _ORDERS.items()}
PANEL = 16  # rows of a weight that are packed together
_HEADS = (None, torch.bfloat16, torch.float16)  # of scales, by the numbers of codes.h


class Laid(NamedTuple):
    """Blocks and what their codes stand for. scales: (N / every, 1) float32, or the dtype of those
    that blocks begin with; table: the values of 16 codes, float32; None: bytes as they are, and 4
    bits from -8 on; head: bytes before a block's codes; every: blocks of a scale; packed: blocks of
    a row of a weight that eights.py has packed, 0 for any other."""

    blocks_NB: Tensor
    scales: Tensor | torch.dtype
    table: Tensor | None
    order: Order
    head: int
    every: int = 1
    packed: int = 0

    @property
    def ready(self) -> bool:
        """Whether codes.cpp reads them where they lie."""
        apart = isinstance(self.scales, Tensor) and not self.scales.is_contiguous()
        return self.blocks_NB.is_contiguous() and self.blocks_NB.is_cpu and not apart

    @property
    def group(self) -> int:
        """Codes of a block."""
        size = self.blocks_NB.shape[1] - self.head
        return size if self.order == "bytes" else 2 * size

    def matrix(self, inner: int, bias_O: Tensor | None = None, eights: Rounding = "") -> Matrix:
        """Of a weight of so many inputs, as the passes in C++ read it. It points at tensors, which
        are to live as long. eights: how what it is multiplied by is rounded (eights.py)."""
        count, block = self.blocks_NB.shape
        scales = self.scales if isinstance(self.scales, Tensor) else None
        group = self.group
        made = matrix(self.blocks_NB, count * group // inner, inner, bias_O)
        made.scales, made.table = (
            None if x is None else x.data_ptr() for x in (scales, self.table)
        )
        made.group, made.block, made.head = group, block, self.head
        made.order, made.eights = _ORDERS[self.order], ROUNDINGS.index(eights)
        made.every, made.packed = self.every, self.packed
        made.kind = _HEADS.index(None if isinstance(self.scales, Tensor) else self.scales)
        return made


def decoded(laid: Laid, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, G) in `dtype`, each a product in float32 that is rounded once."""
    blocks_NB, scales, table, order, head, every, _ = laid = lying(laid)
    kind = 0 if isinstance(scales, Tensor) else _HEADS.index(scales)
    if laid.ready and native.reads(blocks_NB.new_empty(0, dtype=dtype)):
        given = scales if isinstance(scales, Tensor) else None
        y: Tensor = torch.ops.outsize.decode.default(
            blocks_NB, given, table, _ORDERS[order], kind, head, every, dtype
        )
        return y
    return plain(blocks_NB, _apart(laid), table, order, head).to(dtype)


def encoded(groups_NG: Tensor, order: Order, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """Blocks (N, 2 + bytes of codes) of numbers as even steps, behind a scale in bfloat16: in one
    pass on this thread, or by `plain`, its twin, where somebody looks at operators and where no
    pass reads such numbers. order: "bytes" or "halves"."""
    own = groups_NG.dtype == torch.float32 and not groups_NG.requires_grad
    seen = not (own and groups_NG.is_contiguous() and native.bare(groups_NG))
    if seen or not native.lies(groups_NG):
        return plain(groups_NG)
    count, group = groups_NG.shape
    size = 2 + (group if order == "bytes" else group // 2)
    blocks_NB = torch.empty(count, size, dtype=torch.uint8, device=groups_NG.device)
    native.loaded().outsize_encode(
        _ORDERS[order], groups_NG.data_ptr(), count, group, blocks_NB.data_ptr()
    )
    return blocks_NB


def farthest(groups_NG: Tensor) -> Tensor:
    """Of the last dimension, kept as one, what is farthest from zero, with its sign: of several the
    first."""
    most, least = groups_NG.amax(-1, keepdim=True), groups_NG.amin(-1, keepdim=True)
    found, ties = torch.where(most > -least, most, least), (most == -least).squeeze(-1)
    # An argmax of all takes six times as long.
    if not ties.is_meta and bool(ties.any()):
        some = groups_NG[ties]
        found[ties] = some.gather(-1, some.abs().argmax(-1, keepdim=True))
    return found


def whole(laid: Laid) -> tuple[Tensor, Tensor]:
    """Codes (N, G) that are whole numbers, and their scales (N, 1), float32."""
    assert laid.table is None, "of codes that are whole numbers"
    laid = lying(laid)
    scales_N1 = _apart(laid)
    return plain(laid.blocks_NB, torch.ones_like(scales_N1), None, laid.order, laid.head), scales_N1


def lying(laid: Laid) -> Laid:
    """The same, its blocks as they lie in files: a copy of those that are packed."""
    if not laid.packed:
        return laid
    block, head, groups = laid.blocks_NB.shape[1], laid.head, laid.packed
    panel = PANEL * groups  # blocks
    many = len(laid.blocks_NB) // panel
    panels = laid.blocks_NB[: many * panel].reshape(many, panel * block)
    heads, codes = panels.split((panel * head, panel * (block - head)), 1)
    heads = heads.reshape(many, groups, PANEL, head).transpose(1, 2)
    codes = codes.reshape(many, groups, (block - head) // 4, PANEL, 4).permute(0, 3, 1, 2, 4)
    codes = codes.flatten(3) ^ (0 if laid.order == "halves" else 128)
    found = torch.cat((heads, codes), -1).reshape(-1, block)
    blocks_NB = torch.cat((found, laid.blocks_NB[len(found) :]))
    return laid._replace(blocks_NB=blocks_NB, packed=0)


def _apart(laid: Laid) -> Tensor:
    if isinstance(laid.scales, Tensor):
        return laid.scales.repeat_interleave(laid.every, 0)
    return laid.blocks_NB[:, : laid.scales.itemsize].contiguous().view(laid.scales).float()


def plain(
    blocks_NB: Tensor, scales_N1: Tensor, table: Tensor | None, order: Order, head: int
) -> Tensor:
    """The twin of outsize_decode, in float32."""
    if blocks_NB.is_meta:  # for its shape
        meta_kernels()
    codes = blocks_NB[:, head:]
    if order == "bytes":
        return codes.contiguous().view(torch.int8).to(torch.float32).mul_(scales_N1)
    upper, lower = codes >> 4, codes & 15
    if order == "halves":
        names = torch.cat((lower, upper), -1)
    else:
        names = torch.stack((upper, lower), -1).flatten(1)
    table = torch.arange(-8.0, 8.0, device=codes.device) if table is None else table
    values = table.index_select(0, names.flatten().to(torch.int32))
    return values.view(len(blocks_NB), -1).mul_(scales_N1)


def _allocate(
    blocks: Tensor,
    scales: Tensor | None,
    table: Tensor | None,
    order: int,
    kind: int,
    head: int,
    every: int,
    dtype: torch.dtype,
) -> Tensor:
    group = (blocks.shape[1] - head) * (1 if order == 0 else 2)
    return torch.empty(blocks.shape[0], group, dtype=dtype, device=blocks.device)


def _run(
    blocks: Tensor,
    scales: Tensor | None,
    table: Tensor | None,
    order: int,
    kind: int,
    head: int,
    every: int,
    dtype: torch.dtype,
) -> Tensor:
    y = _allocate(blocks, scales, table, order, kind, head, every, dtype)
    where = _HEADS[kind]
    if where is None:
        assert scales is not None, "they lie apart"
        laid = Laid(blocks, scales, table, _NAMES[order], head, every)
    else:
        laid = Laid(blocks, where, table, _NAMES[order], head)
    weight = laid.matrix(y.shape[1])
    native.loaded().outsize_decode(
        native.CODES[dtype], weight.address, y.data_ptr(), native.threads()
    )
    return y


_OPERATORS = (
    native.define(
        "decode(Tensor blocks, Tensor? scales, Tensor? table, int order, int kind, int head,"
        " int every, ScalarType dtype) -> Tensor",
        _run,
        _allocate,
    ),
)
