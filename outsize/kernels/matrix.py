"""A weight as the passes in C++ are told of it: Matrix of codes.h.

O outputs, I inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from torch import Tensor


class Matrix(ctypes.Structure):
    """Addresses and sizes. Where group is 0, numbers as they lie, else blocks of codes."""

    _fields_ = (
        *((name, c_void_p) for name in ("data", "bias", "scales", "table")),
        *((name, c_int64) for name in ("outputs", "inner", "group", "block", "head")),
        *((name, c_int32) for name in ("order", "kind")),
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

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


def matrix(data: Tensor, outputs: int, inner: int, bias_O: Tensor | None = None) -> Matrix:
    """Of a weight that lies as it is. It points at tensors, which are to live as long."""
    bias = None if bias_O is None else bias_O.data_ptr()
    return Matrix(data=data.data_ptr(), bias=bias, outputs=outputs, inner=inner)
