"""Fake tensors of rehearsals: what an operator gave once, it gives again for arguments alike.

PyTorch's own mode asks for twenty things of every argument of every operator, most of them about
symbols and constants, and keeps nothing of operators that are not its own. A rehearsal has neither
symbols nor constants: shapes, strides, dtypes and devices say what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from outsize.torch_private import (
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    device_asked,
    disable_current_modes,
    fake_as,
    grouped_product,
    leave_compiler_out,
    storage_key,
)

_LIFT = torch.ops.aten.lift_fresh.default  # what torch.tensor has made, of which nobody else knows
_OURS = ("aten", "outsize")
_ASKED = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Out:
    """A tensor that an operator gave. of: the argument whose storage it shares, or None; same: it
    is that argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None = None
    same: bool = False


class _Unlike(Exception):
    """An argument or a result about which more is to be asked."""


class _Converter(FakeTensorConverter):
    """Fake tensors for small results of numbers that are known, which stay so as long as nobody
    writes into them. PyTorch's own asks its compiler for a name for each."""

    def from_real_tensor(
        self, fake_mode: Any, t: torch.Tensor, make_constant: bool = False, *args: Any, **more: Any
    ) -> FakeTensor:
        if not make_constant or not _plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, *args, **more)
        fake = _alike(fake_mode, t, t)
        self.add_constant_storage_mapping(fake)
        return fake


def _plain(t: torch.Tensor) -> bool:
    """Whether it is nothing but its numbers, one behind another."""
    return type(t) is torch.Tensor and t.is_contiguous() and not t.requires_grad


def _alike(mode: FakeTensorMode, t: torch.Tensor, constant: torch.Tensor | None) -> FakeTensor:
    with disable_current_modes():
        meta = torch.empty(t.shape, dtype=t.dtype, device="meta")
    return FakeTensor(mode, meta, t.device, constant=constant)


class FakeMode(FakeTensorMode):
    """FakeTensorMode of static shapes, with what operators gave kept for all modes of its kind."""

    def __init__(self) -> None:
        leave_compiler_out()
        super().__init__()
        self.fake_tensor_converter = _Converter(copy_data=False, export=False)
        self._facts: dict[torch.device, dict[str, Any]] = {}  # of tensors on a device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_asked and not self.in_kernel_invocation:
            return args[0].fake_device
        if func is _LIFT and _plain(args[0]) and not self.may_turn_const(args[0]):
            return _alike(self, args[0], None)
        if func is grouped_product and args[0].dtype != torch.bfloat16:
            return self._grouped(*args, **(kwargs or {}))
        tensors: list[FakeTensor] = []
        try:
            key = self._key(func, args, kwargs or {}, tensors)
        except _Unlike:
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = _known()
        outs = known.get(key)
        if outs is None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            known[key] = _learnt(func, result, tensors)
            return result
        if isinstance(outs, _Out):
            return self._made(outs, tensors)
        if isinstance(outs, tuple):
            return outs[0]([None if out is None else self._made(out, tensors) for out in outs[1]])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
        if func.namespace not in _OURS:
            raise _Unlike
        inference, dtype = torch.is_inference_mode_enabled(), torch.get_default_dtype()
        parts: list[Any] = [func, inference, dtype]
        for arg in args:
            parts.append(self._part(arg, tensors))
        for name, arg in kwargs.items():
            parts += (name, self._part(arg, tensors))
        return tuple(parts)

    def _part(self, arg: Any, tensors: list[FakeTensor]) -> Any:
        if arg is None:
            return None
        kind = type(arg)
        if kind is FakeTensor:
            if arg.fake_mode is not self or arg.constant is not None:
                raise _Unlike
            place = len(tensors)
            for i, other in enumerate(tensors):
                if other is arg:
                    place = i
            tensors.append(arg)
            return (
                place, arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device,
                arg.requires_grad,
            )  # fmt: skip
        if kind in _PLAIN:
            return kind, arg
        if kind in (list, tuple) or kind is torch.Size:
            return kind, tuple([self._part(part, tensors) for part in arg])
        raise _Unlike

    def _grouped(
        self,
        a: FakeTensor,
        b: FakeTensor,
        offs: FakeTensor | None = None,
        bias: FakeTensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> FakeTensor:
        """Products of groups of rows, of which PyTorch knows bfloat16 alone where there is no
        memory; transformers calls them for experts in any precision. Rows begin at 16 bytes."""
        dtype = out_dtype or a.dtype
        ends = a.shape[-2], b.shape[-1]
        if a.ndim == b.ndim:
            count = offs.shape[0] if a.ndim == 2 and offs is not None else a.shape[0]
            shape: tuple[int, ...] = count, *ends
        else:
            shape = ends
        each = 16 // dtype.itemsize
        row = -(-ends[1] // each) * each
        stride = (ends[0] * row, row, 1)[-len(shape) :]
        return FakeTensor(
            self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), a.fake_device
        )

    def _made(self, out: _Out, tensors: list[FakeTensor]) -> FakeTensor:
        if out.same:
            return tensors[out.of or 0]
        meta = torch.empty_strided(out.shape, out.stride, dtype=out.dtype, device="meta")
        if out.of is not None:
            meta.set_(tensors[out.of].untyped_storage(), out.offset, out.shape, out.stride)
        if out.device not in self._facts:
            facts = vars(FakeTensor(self, meta, out.device))
            self._facts[out.device] = {n: x for n, x in facts.items() if n != "fake_mode"}
        return fake_as(self._facts[out.device], meta, self)


@cache
def _known() -> dict[Any, Any]:
    """What operators gave, by what they were given: an _Out, (list or tuple, outs), or False where
    PyTorch is to be asked each time."""
    return {}


def _learnt(func: Any, result: Any, tensors: list[FakeTensor]) -> Any:
    if _ASKED.intersection(func.tags):
        return False
    try:
        if type(result) not in (list, tuple):
            return _out(result, tensors)
        outs = [None if one is None else _out(one, tensors) for one in result]
        own = [
            storage_key(r) for r, out in zip(result, outs, strict=True) if out and out.of is None
        ]
        return (type(result), outs) if len(set(own)) == len(own) else False
    except _Unlike:
        return False


def _out(result: Any, tensors: list[FakeTensor]) -> _Out:
    if type(result) is not FakeTensor or result.constant is not None:
        raise _Unlike
    shape, stride = tuple(result.shape), result.stride()
    offset, dtype, device = int(result.storage_offset()), result.dtype, result.fake_device
    for i, tensor in enumerate(tensors):
        if tensor is result:
            return _Out(shape, stride, offset, dtype, device, i, True)
    if result.requires_grad or result.layout is not torch.strided or result.is_quantized:
        raise _Unlike
    if result.is_conj() or result.is_neg():
        raise _Unlike
    key = storage_key(result)
    of = next((i for i, tensor in enumerate(tensors) if storage_key(tensor) == key), None)
    if of is None:
        dense = torch.empty_strided(shape, stride, dtype=dtype, device="meta").untyped_storage()
        if offset or dense.nbytes() != result.untyped_storage().nbytes():
            raise _Unlike
    return _Out(shape, stride, offset, dtype, device, of)
