"""Products and attention of each token alone: rows.cpp, pages.cpp.

A library's product sums in an order that depends on how many rows it is given, so that what a
request is told would depend on who else asks. Here every number has an order of its own: bit for
bit the same in any batch, in slices of any length, with any number of threads, and in a forward
pass of training whose precision is +invariant.

T tokens, I in, O out, H query heads, G key-value heads, K and W head sizes of keys and values, P
pages of `page` tokens.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.kernels import native

if TYPE_CHECKING:
    from outsize.kernels.codes import Laid

PAGE = 64  # tokens of a page at most, as in rows.cpp
WIDTH = 256  # the largest head size, as in tiles.h
_VECTORS = 64  # elements: of any processor's, and of as many as PyTorch takes at once
_EVERY = 1 << 40  # a window that hides nothing
_HERE = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """In this thread, products of float32 and bfloat16 on a CPU are made row by row alone, where
    autograd does not record them and there is a compiler."""
    before = getattr(_HERE, "alone", False)
    _HERE.alone = True
    try:
        yield
    finally:
        _HERE.alone = before


def wanted(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether `linear` is to make this product."""
    here = getattr(_HERE, "alone", False) and x.dtype is weight_OI.dtype
    return here and weight_OI.is_contiguous() and native.served(x, weight_OI)


def here() -> bool:
    """Whether this thread computes each row alone."""
    return getattr(_HERE, "alone", False)


def lying(x: Tensor) -> Tensor:
    """Rows one behind another where each is computed alone: whether those of a wider tensor do
    depends on how many there are."""
    return x.contiguous() if getattr(_HERE, "alone", False) else x


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each element of x (..., D). PyTorch takes whole vectors of them by other
    instructions than what is left at the end, and which are left depends on the other rows: where
    each row is computed alone, rows are whole vectors."""
    size = x.shape[-1]
    if not getattr(_HERE, "alone", False) or size % _VECTORS == 0:
        return function(x)
    padded = torch.nn.functional.pad(x, (0, _VECTORS - size % _VECTORS))
    return function(padded)[..., :size].contiguous()


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x (..., I) times weight plus bias: (..., O)."""
    y: Tensor = torch.ops.outsize.rows_product.default(x, weight_OI, bias_O)
    return y


def put(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out: Tensor) -> None:
    """out = x (..., I) times weight plus bias, contiguous and of their dtype."""
    torch.ops.outsize.rows_product_into.default(x, weight_OI, bias_O, out)


def wanted_by_codes(x: Tensor) -> bool:
    """Whether `by_codes` is to make products by codes that it reads."""
    return getattr(_HERE, "alone", False) and native.served(x)


def by_codes(x: Tensor, laid: Laid, outputs: int, bias_O: Tensor | None) -> Tensor:
    """x (..., I) times the weight that blocks of codes stand for, rows one behind another, rounded
    to the dtype of x, plus bias: (..., O). Its bits are those of `linear` by that weight."""
    x, y = x.contiguous(), x.new_empty((*x.shape[:-1], outputs))
    blocks, scales, table = laid.blocks_NB, laid.scales_N1, laid.table
    bias = None if bias_O is None else bias_O.to(x.dtype).contiguous()
    group = x.shape[-1] * outputs // len(blocks)
    native.loaded().outsize_rows_product_coded(
        *(native.CODES[x.dtype], laid.number, x.data_ptr(), blocks.data_ptr(), scales.data_ptr()),
        *(scales.data_ptr() if table is None else table.data_ptr(),),
        *(None if bias is None else bias.data_ptr(), y.data_ptr()),
        *(y.numel() // outputs, x.shape[-1], outputs, group, blocks.shape[1], laid.head),
        native.threads(),
    )
    return y


def _allocate(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_OI.shape[0]))


def _run(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    y = _allocate(x, weight_OI, bias_O)
    _run_into(x, weight_OI, bias_O, y)
    return y


def _run_into(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, y: Tensor) -> None:
    assert y.is_contiguous() and y.dtype is x.dtype, "rows lie one behind another"
    x = x.contiguous()
    if bias_O is not None:
        bias_O = bias_O.to(x.dtype).contiguous()
    outputs, inner = weight_OI.shape
    native.loaded().outsize_rows_product(
        *(native.CODES[x.dtype], x.data_ptr(), weight_OI.data_ptr()),
        *(None if bias_O is None else bias_O.data_ptr(), y.data_ptr()),
        *(y.numel() // outputs if outputs else 0, inner, outputs, native.threads()),
    )


@dataclass(frozen=True)
class Seen:
    """What the tokens of a step see. tables: the pages of each sequence, one behind another;
    begins: by token, where those of its sequence begin; positions: its place in the sequence."""

    tables: array[int]
    begins: array[int]
    positions: array[int]


def fits(q_THK: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend` takes these."""
    small = q_THK.shape[-1] <= WIDTH and values.shape[-1] <= WIDTH and keys.shape[1] <= PAGE
    return small and native.fits(q_THK, keys, values)


def attend(
    q_THK: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Seen,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """o_THW: each token over those of its sequence up to itself, the last `window` of them.
    keys (P, page, G, K), values (P, page, G, W)."""
    (_, page, groups, key), value = keys.shape, values.shape[-1]
    tokens, heads, _ = q_THK.shape
    o_THW = q_THK.new_empty((tokens, heads, value))
    sizes = native.numbers((page, heads, groups, key, value, _EVERY if window is None else window))
    native.loaded().outsize_pages_attend(
        *(native.CODES[q_THK.dtype], q_THK.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(o_THW.data_ptr(), *map(_address, (seen.tables, seen.begins, seen.positions))),
        *(sizes, tokens, scale, softcap or 0.0, native.threads()),
    )
    return o_THW


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def numbers(values: Sequence[int]) -> array[int]:
    """As rows.cpp reads them."""
    return array("q", values)


_PRODUCTS = (
    native.define("rows_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _run, _allocate),
    native.define(
        "rows_product_into(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
        _run_into,
        native.nothing,
    ),
)
