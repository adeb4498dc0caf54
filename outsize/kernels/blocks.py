"""A run of blocks over the tokens of a step of serving, in one call: blocks.cpp.

T tokens, D hidden.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.pages import Pool, Seen
from outsize.kernels.rows import Matrix


class NormOf(ctypes.Structure):
    """Of an RMS norm; without a weight: none."""

    _fields_ = (
        ("weight", c_void_p),
        ("eps", c_float),
        ("offset", c_float),
        ("dtype", c_int32),
        ("unused", c_int32),
    )


NORMS = ("attention", "query", "key", "attention_out", "mlp", "mlp_out")
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


class Layer(ctypes.Structure):
    """A block as blocks.cpp has it; what it points at is to live as long."""

    _fields_ = (
        *((name, NormOf) for name in (f"{name}_norm" for name in NORMS)),
        *((name, Matrix) for name in PRODUCTS),
        *((name, c_void_p) for name in ("keys", "key_scales", "values", "value_scales")),
        *((name, c_void_p) for name in ("product", "put", "attend")),
        *((name, c_int64) for name in ("heads", "groups", "head", "value", "window", "rope")),
        ("scale", c_float),
        ("softcap", c_float),
        ("interleaved", c_int32),
        ("form", c_int32),
    )
    head: int
    groups: int
    value: int
    keys: int | None

    def hold(self, keys: Pool, values: Pool) -> None:
        """The pages that it puts keys and values in, and the passes that this takes."""
        self.form = keys.form.number
        pages = native.paging(keys.dtype, keys.form.coded)
        self.put, self.attend = map(_address, (pages.outsize_pages_put, pages.outsize_pages_attend))
        if not all(getattr(self, name).eights for name in PRODUCTS):
            self.product = _address(native.serving(keys.dtype).outsize_rows_product)
        self.keys, self.values = keys.data.data_ptr(), values.data.data_ptr()
        if keys.scales is not None and values.scales is not None:
            self.key_scales, self.value_scales = keys.scales.data_ptr(), values.scales.data_ptr()


def _address(function: Any) -> int | None:
    return ctypes.cast(function, c_void_p).value


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tables", "begins", "positions", "where")),
        *((name, c_void_p) for name in ("cos", "sin", "pairs")),
        *((name, c_int64) for name in ("tokens", "hidden", "page", "threads")),
    )


def run(
    layers: ctypes.Array[Layer],
    x_TD: Tensor,
    where_T: Tensor,
    page: int,
    seen: Seen,
    ropes: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """x_TD through the blocks, float32 or bfloat16, in its place where it lies in rows. where_T:
    rooms of the tokens among those of all pages, int64; ropes: cosines and sines (T, P) in float32,
    by the numbers that layers have."""
    y_TD, passes = x_TD.contiguous(), native.serving(x_TD.dtype)
    tables = [torch.Tensor.contiguous(x) for table in ropes for x in table]
    cos, sin = ((c_void_p * len(ropes))(*(x.data_ptr() for x in tables[i::2])) for i in (0, 1))
    pairs = native.numbers(x.shape[-1] for x in tables[::2])
    held = (c_int64 * len(ropes)).from_buffer_copy(pairs)
    step = _Step(
        *(x.buffer_info()[0] for x in (seen.tables, seen.begins, seen.positions)),
        where_T.data_ptr(),
        *(ctypes.addressof(cos), ctypes.addressof(sin), ctypes.addressof(held)),
        *(*x_TD.shape, page, native.threads()),
    )
    told = (ctypes.addressof(step), ctypes.addressof(layers), len(layers))
    work = torch.empty(passes.outsize_blocks_work(*told), dtype=torch.uint8)
    passes.outsize_blocks(*told, y_TD.data_ptr(), work.data_ptr())
    return y_TD
