"""Counting what operators do: floating-point operations, bytes moved, calls.

Works on fake tensors, so a step of any size is counted without running it. Times follow from the
counts and a machine's measured rates: a matrix product takes its operations over the rate of
matrix products, everything else the bytes it reads and writes over the bandwidth of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from outsize.torch_private import DispatchMode, device_asked, fake_device

Direction = Literal["forward", "backward"]
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten.mm.out, _aten.bmm.out}
_ADDED_PRODUCTS = {
    _aten.addmm.default, _aten.baddbmm.default, _aten.addmm_.default, _aten.addmm.out
}  # fmt: skip
_FUSED = ("flash_attention", "efficient_attention", "cudnn_attention")
# They read and write as many elements as they are asked for, however many there are: what is picked
# by an index, and what is added at one.
_PICKED = ("gather", "embedding", "index", "index_select")
_ADDED_AT = ("scatter_add_", "index_add_")
_FREE = ("empty", "reshape", "_unsafe_view")  # beside what gives views


@dataclass
class Work:
    """products: calls of matrix products by (rows, inner, columns, dtype); attention: operations of
    fused attention by (direction, dtype); moved: bytes read and written by all else; calls:
    operators called; widest: keys and size of a head of the longest attention."""

    products: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    attention: dict[tuple[Direction, str], float] = field(default_factory=dict)
    moved: float = 0.0
    calls: int = 0
    widest: tuple[int, int] = (0, 0)

    def flops(self) -> float:
        """Floating-point operations of products and attention."""
        products = sum(2.0 * m * k * n * calls for (m, k, n, _), calls in self.products.items())
        return products + sum(self.attention.values())


class Counter(DispatchMode):
    """Adds the work of every operator to `work` while entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_asked and (device := fake_device(args[0])) is not None:
            return device  # which autograd asks as often as there are operators
        result = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, result)
        return result

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Book one operator."""
        if func.namespace == "prim":  # fake tensors ask for their device so
            return
        name = func._schema.name.removeprefix("aten::")
        work = self.work
        if name.startswith(_FREE) or _gives_views(func):
            return
        work.calls += 1
        if func in _PRODUCTS:
            self._product(args[0], args[1])
        elif func in _ADDED_PRODUCTS:
            self._product(args[1], args[2])
        elif name == "mkldnn::_linear_pointwise":
            self._product(args[0], args[1].t())
        elif name == "outsize::grouped":
            self._product(args[0], args[1][0].t())  # each row meets one of the weights
        elif name == "outsize::grouped_add":
            self._product(args[1].t(), args[2])
        elif any(kind in name for kind in _FUSED):
            self._attention(func, args, kwargs)
        elif name.startswith("outsize::attention"):
            self._packed_attention("backward" in name, args)
        elif "convolution" in name:
            self._convolution(args, result)
        elif name.startswith("new_") or name.endswith("_like"):  # what they are given says its form
            work.moved += 0 if "empty" in name else _bytes(result)
        elif name in _PICKED:
            work.moved += _bytes(args[1:]) + 2 * _bytes(result)
        elif name in _ADDED_AT:
            work.moved += _bytes(args[1:]) + 2 * _bytes(args[-1])
        else:
            work.moved += _bytes(args) + _bytes(result) + _written(func, args)

    def _product(self, a: Tensor, b: Tensor) -> None:
        key = (prod(a.shape[:-1]), a.shape[-1], b.shape[-1], _dtype(a))
        self.work.products[key] = self.work.products.get(key, 0) + 1

    def _attention(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forward: q, k, v; backward: gradient, q, k, v. Two products over all scores, or over
        half of them where the call is causal; a mask saves nothing."""
        back = "backward" in func._schema.name
        q, k, v = args[1:4] if back else args[0:3]
        scores = prod(q.shape[:3]) * k.shape[2] * (0.5 if _is_causal(func, args, kwargs) else 1.0)
        operations = 2.0 * scores * (q.shape[3] + v.shape[3]) * (2.5 if back else 1.0)
        self._add_attention(back, q, operations)
        self.work.widest = max(self.work.widest, (k.shape[2], q.shape[3]))

    def _packed_attention(self, back: bool, args: Any) -> None:
        """outsize/kernels/attention.py: of documents, their scores before the diagonal and half of
        those on it, as far as the window reaches; of the first one, only the last queries'."""
        q, k, v = args[1:4] if back else args[0:3]
        lists = (i for i, x in enumerate(args) if isinstance(x, list | tuple))
        at = next(i for i in lists if type(args[i][0]) is int)  # of gradients there may be one too
        bounds, _, window = args[at : at + 3]
        past = k.shape[0] - q.shape[0]
        seen = sum(_triangle(stop - start, window) for start, stop in pairwise(bounds))
        scores = q.shape[1] * (seen - _triangle(past, window))
        longest = max(stop - start for start, stop in pairwise(bounds))
        self.work.widest = max(self.work.widest, (longest, q.shape[2]))
        self._add_attention(
            back, q, 2.0 * scores * (q.shape[2] + v.shape[2]) * (2.5 if back else 1.0)
        )

    def _add_attention(self, back: bool, q: Tensor, operations: float) -> None:
        key: tuple[Direction, str] = ("backward" if back else "forward", _dtype(q))
        self.work.attention[key] = self.work.attention.get(key, 0.0) + operations

    def _convolution(self, args: Any, result: Any) -> None:
        """As a product of output positions, weights of one output, output channels; a backward
        pass makes two."""
        back = isinstance(result, tuple)
        out, weight = (args[0], args[2]) if back else (result, args[1])
        channels = weight.shape[0]
        key = (out.numel() // channels, weight.numel() // channels, channels, _dtype(weight))
        self.work.products[key] = self.work.products.get(key, 0) + (2 if back else 1)


@cache
def _gives_views(func: Any) -> bool:
    """Whether an operator gives other views of what it is given, and moves nothing."""
    given = [one.alias_info for one in func._schema.returns]
    return bool(given) and all(one is not None and not one.is_write for one in given)


def _triangle(length: int, window: int | None) -> float:
    """Scores of a document: half of the square, less what a window hides."""
    hidden = 0 if window is None else max(0, length - window)
    return (length**2 - hidden**2) / 2


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _written(func: Any, args: Any) -> float:
    """Bytes of what an operator that gives nothing back writes over."""
    schema = func._schema
    if schema.returns:
        return 0.0
    said = zip(schema.arguments, args, strict=False)
    return sum(_bytes(x) for one, x in said if one.alias_info and one.alias_info.is_write)


def _bytes(values: Any) -> float:
    if isinstance(values, Tensor):
        return float(values.numel() * values.element_size())
    if isinstance(values, (tuple, list)):
        return sum(_bytes(value) for value in values)
    return 0.0
