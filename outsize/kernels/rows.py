"""Products of each token alone: rows.cpp.

A library's product sums in an order that depends on how many rows it is given, so that what a
request is told would depend on who else asks. Here every number has an order of its own: bit for
bit the same in any batch, in slices of any length, with any number of threads, and in a forward
pass of training whose precision is +invariant.

I in, O out.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from outsize.kernels import native
from outsize.torch_private import FakeTensor, watched

if TYPE_CHECKING:
    from outsize.kernels.codes import Laid

_VECTORS = 64  # elements: of any processor's, and of as many as PyTorch takes at once
# Of rows.cpp, eights.h and tiles.h: rows that are made wide, or rounded, at once; the widest
# vectors; weights that a thread makes wide, outputs whose sums it has, numbers that share a sum.
_WIDE, _ROUNDED, _LANES, _OUTPUTS, _ACROSS, _CHUNK = 512, 128, 16, 4, 16, 32
_HERE = threading.local()
# Of what codes are multiplied by: none, to 8 bits, the same but for outliers (eights.py).
Rounding = Literal["", "+a8", "+outliers"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


class Matrix(ctypes.Structure):
    """A weight as the passes in C++ are told of it (codes.h): addresses and sizes. Where group is
    0, numbers as they lie, else blocks of codes. eights: of ROUNDINGS, which. most, packed:
    of codes.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("data", "bias", "scales", "table")),
        *((name, c_int64) for name in ("outputs", "inner", "group", "block", "head")),
        *((name, c_int32) for name in ("order", "kind", "eights", "every")),
        ("most", c_void_p),
        ("packed", c_int64),
    )
    data: int | None
    bias: int | None
    scales: int | None
    table: int | None
    outputs: int
    inner: int
    group: int
    block: int
    head: int
    order: int
    kind: int
    eights: int
    every: int
    most: int | None
    packed: int

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


def matrix(data: Tensor, outputs: int, inner: int, bias_O: Tensor | None = None) -> Matrix:
    """Of a weight (O, I) that lies as it is. It points at tensors, which are to live as long."""
    bias = None if bias_O is None else bias_O.data_ptr()
    return Matrix(data=data.data_ptr(), bias=bias, outputs=outputs, inner=inner, every=1)


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


def scratch(x: Tensor, outputs: int, group: int = 0, eights: Rounding = "") -> int:
    """Bytes at most that a product has for a while in memory of its own, which no allocator sees,
    beside x (..., I) and its result: rows made wide or rounded, and what each thread works in.
    group: of the weight's codes, 0 where it has none; eights: how rows are rounded."""
    inner, threads = x.shape[-1], native.threads()
    tokens = x.numel() // max(1, inner)
    if eights:
        some, groups = min(tokens, _ROUNDED), inner // group
        whole = some * (2 * inner + 4 * groups * (1 + group // _CHUNK))
        if eights == "+outliers":  # a list a row, which has room for twice as many as it may hold
            whole += some * (24 + 24 * inner)
        return 8 + whole + 4 * threads * _ACROSS * (groups + some)
    narrow = x.dtype is not torch.float32
    size = 4 * outputs  # its bias, made wide
    if narrow or inner % _LANES:
        size += 4 * min(tokens, _WIDE) * -(-inner // _LANES) * _LANES
    return size + (4 * threads * _OUTPUTS * inner if narrow or group else 0)


def _shown(x: Tensor, outputs: int, group: int = 0, eights: Rounding = "") -> None:
    """Let who counts bytes see the scratch of a product come and go, of fake tensors too."""
    if watched():
        x.new_empty(scratch(x, outputs, group, eights), dtype=torch.uint8)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x (..., I) times weight plus bias: (..., O)."""
    y: Tensor = torch.ops.outsize.rows_product.default(x, weight_OI, bias_O)
    _shown(x, weight_OI.shape[0])
    return y


def put(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out: Tensor) -> None:
    """out = x (..., I) times weight plus bias, contiguous and of their dtype."""
    torch.ops.outsize.rows_product_into.default(x, weight_OI, bias_O, out)
    _shown(x, weight_OI.shape[0])


def wanted_by_codes(x: Tensor) -> bool:
    """Whether `by_codes` is to make products by codes that it reads."""
    return getattr(_HERE, "alone", False) and native.served(x)


def by_codes(
    x: Tensor,
    laid: Laid,
    outputs: int,
    bias_O: Tensor | None,
    eights: Rounding = "",
    most_T: Tensor | None = None,
) -> Tensor:
    """x (..., I) times the weight that blocks of codes stand for, rows one behind another, rounded
    to the dtype of x, plus bias: (..., O). Its bits are those of `linear` by that weight, or with
    eights, and most_T (float32), of what eights.py says."""
    x, y = x.contiguous(), x.new_empty((*x.shape[:-1], outputs))
    _shown(x, outputs, laid.group, eights)
    if isinstance(x, FakeTensor):
        return y
    bias = None if bias_O is None else bias_O.to(x.dtype).contiguous()
    weight = laid.matrix(x.shape[-1], bias, eights)
    weight.most = None if most_T is None else most_T.data_ptr()
    _multiply(x, weight, y)
    return y


def _multiply(x: Tensor, weight: Matrix, y: Tensor) -> None:
    tokens = y.numel() // weight.outputs if weight.outputs else 0
    told = x.data_ptr(), weight.address, y.data_ptr(), tokens, native.threads(), -1
    if weight.eights:
        native.loaded().outsize_eights_product(native.CODES[x.dtype], *told)
    else:
        native.serving(x.dtype).outsize_rows_product(*told)


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
    _multiply(x, matrix(weight_OI, outputs, inner, bias_O), y)


_PRODUCTS = (
    native.define("rows_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _run, _allocate),
    native.define(
        "rows_product_into(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
        _run_into,
        native.nothing,
    ),
)
