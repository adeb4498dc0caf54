"""Keys and values in pages, and attention over them, each token alone: pages.cpp.

Pages hold numbers as they are or in a narrower form: as codes of 8 or 4 bits, GROUP of a head's
numbers with one scale in bfloat16. A token's codes are its own, so that what is held of it does not
depend on what else is. Codes of a few bits for keys and values: Sheng et al., "FlexGen", 2023.

T tokens, H query heads, G key-value heads, K and W head sizes of keys and values, P pages of `page`
tokens, B groups of a head's numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.kernels import native
from outsize.torch_private import FakeTensor

GROUP = 32  # numbers that share a scale, as in pages.cpp
EVERY = 1 << 40  # a window that hides nothing
_NARROW = torch.bfloat16


@dataclass(frozen=True)
class Form:
    """How pages hold numbers. number: its own in pages.cpp; dtype: of numbers that are held as they
    are, None for the model's; bits: of a code, 0 where there are none."""

    number: int
    dtype: torch.dtype | None = None
    bits: int = 0

    @property
    def coded(self) -> bool:
        """Whether pages hold numbers otherwise than the model does."""
        return self.number > 0

    def bytes(self, size: int, dtype: torch.dtype) -> int:
        """Of a head of so many numbers in a model of this dtype."""
        return sum(self.buffers(size, dtype))

    def buffers(self, size: int, dtype: torch.dtype) -> tuple[int, ...]:
        """The same in each tensor of a Pool."""
        if not self.bits:
            return (size * (self.dtype or dtype).itemsize,)
        return -(-size * self.bits // 8), -(-size // GROUP) * _NARROW.itemsize

    def exact(self, dtype: torch.dtype) -> bool:
        """Whether numbers of this dtype come back as they were."""
        return not self.bits and self.dtype in (None, dtype)


AS_STORED = "as-stored"
FORMS: Mapping[str, Form] = {
    AS_STORED: Form(0),
    "bf16": Form(1, _NARROW),
    "int8": Form(2, bits=8),
    "int4": Form(3, bits=4),
}


Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]  # of this shape, with whatever numbers


class Pool:
    """Pages for keys or values of a layer. like: (T, G, K) of the model's dtype; empty: makes its
    tensors where they do not lie as PyTorch has them. row: numbers of a head that lie there, of
    which these are the first `size`."""

    def __init__(
        self, form: Form, pages: int, page: int, like: Tensor, empty: Empty | None = None
    ) -> None:
        empty = empty or (lambda shape, dtype: like.new_empty(shape, dtype=dtype))
        self.form, self.page = form, page
        self.dtype, (_, self.groups, self.size) = like.dtype, like.shape
        self.row = self.size
        shape = pages, page, self.groups
        self.scales: Tensor | None = None
        if form.bits:
            row, scales = -(-self.size * form.bits // 8), -(-self.size // GROUP)
            self.data = empty((*shape, row), torch.uint8)
            self.scales = empty((*shape, scales), _NARROW)
        else:
            self.data = empty((*shape, self.size), form.dtype or self.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data] if self.scales is None else [self.data, self.scales]

    def first(self, size: int) -> Pool:
        """The first numbers of each head, where they lie."""
        part = copy(self)
        part.size = size
        return part

    def put(self, where_T: Tensor, x_TGK: Tensor) -> None:
        """Hold these at places among those of all pages."""
        real = not isinstance(x_TGK, FakeTensor)
        if real and x_TGK.dtype is self.dtype and native.fits(x_TGK):
            scales = None if self.scales is None else self.scales.data_ptr()
            native.paging(self.dtype, self.form.coded).outsize_pages_put(
                *(self.form.number, x_TGK.data_ptr(), self.data.data_ptr(), scales),
                *(where_T.data_ptr(), *x_TGK.shape),
            )
        else:
            self.plain_put(where_T, x_TGK)

    def plain_put(self, where_T: Tensor, x_TGK: Tensor) -> None:
        """The twin of outsize_pages_put."""
        if self.scales is None:
            held = x_TGK.to(self.data.dtype)
        else:
            held, scales_TGB = coded(x_TGK, self.form.bits)
            self.scales.flatten(0, 1).index_copy_(0, where_T, scales_TGB)
        self.data.flatten(0, 1).index_copy_(0, where_T, held)

    def get(self, pages: Tensor | slice) -> Tensor:
        """(P, page, G, K) of some pages, in the model's dtype."""
        data = self.data[pages]
        if self.scales is None:
            return data[..., : self.size].to(self.dtype)
        return decoded(data, self.scales[pages], self.form.bits, self.size).to(self.dtype)


def coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x (..., K) as codes of 8 or 4 bits (..., bytes), uint8, and scales (..., B), bfloat16. Of 8
    bits the largest magnitude is 127; of 4 bits it is -8, whatever its sign, and codes count from
    0, a pair of them a byte, the first one low."""
    size = x.shape[-1]
    x = F.pad(x.float(), (0, -size % GROUP)).unflatten(-1, (-1, GROUP))
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    if bits == 8:
        scales = (torch.maximum(high, -low) / 127).to(_NARROW)
    else:
        scales = (torch.where(high > -low, high, low) / -8).to(_NARROW)
    wide = scales.float()
    codes = (x / torch.where(wide == 0, 1.0, wide)).round_().flatten(-2)[..., :size]
    if bits == 8:
        return codes.clamp_(-127, 127).to(torch.int8).view(torch.uint8), scales.squeeze(-1)
    raw = F.pad((codes.clamp_(-8, 7) + 8).to(torch.uint8), (0, size % 2))
    return raw[..., ::2] | raw[..., 1::2] << 4, scales.squeeze(-1)


def decoded(codes: Tensor, scales: Tensor, bits: int, size: int) -> Tensor:
    """(..., K) float32: the twin of what pages.cpp reads."""
    if bits == 8:
        numbers = codes.view(torch.int8).float()[..., :size]
    else:
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :size]
        numbers = pairs.float() - 8
    return numbers * scales.float().repeat_interleave(GROUP, -1)[..., :size]


@dataclass(frozen=True)
class Seen:
    """What the tokens of a step see. tables: the pages of each sequence, one behind another;
    begins: by token, where those of its sequence begin; positions: its place in the sequence."""

    tables: array[int]
    begins: array[int]
    positions: array[int]


def fits(q_THK: Tensor, keys: Pool) -> bool:
    """Whether `attend` takes these."""
    return keys.dtype is q_THK.dtype and native.fits(q_THK)


def attend(
    q_THK: Tensor,
    keys: Pool,
    values: Pool,
    seen: Seen,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """o_THW: each token over those of its sequence up to itself, the last `window` of them."""
    tokens, heads, size = q_THK.shape
    o_THW = q_THK.new_empty((tokens, heads, values.size))
    if isinstance(q_THK, FakeTensor):
        return o_THW
    window = EVERY if window is None else window
    sizes = native.numbers((keys.page, heads, keys.groups, size, values.size, window, values.row))
    held = (x for one in (keys, values) for x in (one.data, one.scales))
    native.paging(q_THK.dtype, keys.form.coded).outsize_pages_attend(
        *(keys.form.number, q_THK.data_ptr()),
        *(None if x is None else x.data_ptr() for x in held),
        *(o_THW.data_ptr(), *map(_address, (seen.tables, seen.begins, seen.positions))),
        *(sizes, tokens, scale, softcap or 0.0, native.threads(), -1, None),
    )
    return o_THW


def documents(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGW: Tensor,
    bounds: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """o_THW of whole documents whose keys and values lie one behind another: each token a page."""
    keys, values = (Pool(FORMS[AS_STORED], 0, 1, x) for x in (k_TGK, v_TGW))
    keys.data, values.data = (x.contiguous().unsqueeze(1) for x in (k_TGK, v_TGW))
    tables, begins, places = range(bounds[-1]), list[int](), list[int]()
    for start, stop in pairwise(bounds):
        begins += [start] * (stop - start)
        places += range(stop - start)
    seen = Seen(*map(numbers, (tables, begins, places)))
    return attend(q_THK.contiguous(), keys, values, seen, scale, window, None)


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def numbers(values: Sequence[int]) -> array[int]:
    """As pages.cpp reads them."""
    return array("q", values)
