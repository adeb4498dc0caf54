"""AdamW with both moments in 8 bits, in one pass over memory.

A moment is held as codes of a table of 256 values and a scale for each block of numbers: the
largest magnitude in the block. Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
2021 (arXiv 2110.02861), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from outsize import accelerator
from outsize.kernels import native
from outsize.torch_private import unset_fake_temporarily

MOST = 4096  # elements of a block that blockwise.cpp can hold
PIECE = 1 << 16  # elements that the twin updates at a time: some megabytes of temporaries
_DECADES = 7  # of the tables: from 10^-7 to 1
ZERO = 2**_DECADES - 1  # the code of 0 in the signed table; in the other it is 0
_LEAST = 2.0**-27  # below every border but the one at zero
_TINY = 2.0**-126  # the least normal number of float32: its inverse is finite
_HIGH = 16  # bits of a float32 that do not name a bucket


@dataclass(frozen=True)
class Table:
    """values: of the 256 codes, rising. borders: a number has as code how many of them lie below
    it; 256, the last is infinity."""

    values: Tensor
    borders: Tensor

    def codes(self, x: Tensor) -> Tensor:
        """Of numbers from -1 to 1, or what rounding adds; ties go to the lower one."""
        borders = self.borders[:-1].to(x)
        return torch.bucketize(x, borders).to(torch.uint8)


@cache
def table(signed: bool) -> Table:
    """Dynamic tree quantisation: a decade below 1 for each leading zero bit, and what bits are left
    cut it evenly; a value is the middle of its part. Zero and 1 are values of their own.

    As the authors' code has it: between 0.1 and 1 (the paper writes 0.9), and unsigned numbers give
    their sign's bit to the parts. No negative number is rounded to zero: its sign would be lost.
    """
    with unset_fake_temporarily():  # a rehearsal may be the first who asks
        return _table(signed)


def _table(signed: bool) -> Table:
    found = [torch.zeros(1), torch.ones(1)]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        parts = 10.0 ** (decade + 1 - _DECADES) * (edges[:-1] + edges[1:]) / 2
        found += [parts, -parts] if signed else [parts]
    values = torch.cat(found).sort().values
    borders = (values[:-1] + values[1:]) / 2
    if signed:
        borders[ZERO - 1] = -_TINY
    return Table(values, torch.cat([borders, torch.tensor([math.inf])]))


@dataclass(frozen=True)
class _Tables:
    """Of both moments, as blockwise.cpp reads them."""

    values: Tensor
    borders: Tensor
    buckets: Tensor
    first: int
    count: int


@cache
def _tables() -> _Tables:
    both = table(True), table(False)
    first, last = (int(torch.tensor(x).view(torch.int32)) >> _HIGH for x in (_LEAST, 1.0))
    highs = torch.arange(first, last + 1, dtype=torch.int32)
    least = (highs << _HIGH).view(torch.float32)
    least[0] = 0.0  # the first bucket begins at zero
    most = -((highs << _HIGH) | ((1 << _HIGH) - 1)).view(torch.float32)
    buckets = [torch.bucketize(x, one.borders) for one in both for x in (least, most)]
    return _Tables(
        torch.cat([one.values for one in both]),
        torch.cat([one.borders for one in both]),
        torch.cat(buckets).to(torch.int32),
        first,
        len(highs),
    )


@dataclass(frozen=True)
class Moments:
    """Of some weights: codes and scales of the mean of gradients and of that of their squares."""

    mean: Tensor
    mean_scale: Tensor
    square: Tensor
    square_scale: Tensor


@dataclass(frozen=True)
class Rates:
    """One update. step: 1 at the first. decay: times the rate, of each weight."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    step: int

    @property
    def numbers(self) -> list[float]:
        """What arithmetic needs: as the struct of blockwise.cpp has them."""
        one, two = self.betas
        rate = self.lr / (1 - one**self.step)
        root = 1 / math.sqrt(1 - two**self.step)
        return [1 - self.lr * self.decay, rate, one, 1 - one, two, 1 - two, root, self.eps]


def update(weights: Tensor, gradients: Tensor, moments: Moments, block: int, rates: Rates) -> None:
    """Update weights and moments in place; all contiguous. A scale stands for `block` elements,
    counted from the first; the last may stand for fewer."""
    states = (moments.mean, moments.mean_scale, moments.square, moments.square_scale)
    torch.ops.outsize.blockwise_adam.default(weights, gradients, *states, block, rates.numbers)


def plain(
    weights: Tensor, gradients: Tensor, moments: Moments, block: int, numbers: list[float]
) -> None:
    """The twin of outsize_blockwise_adam, bit for bit; computes in float64 for such weights."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    keep, rate, one, rest_one, two, rest_two, root, eps = numbers
    for w, g, (mean, mean_scale), (square, square_scale) in _parts(
        weights, gradients, moments, block
    ):
        x = g.to(wide)
        m = _wide(mean, mean_scale, table(True), block, wide).mul_(one).add_(x * rest_one)
        v = _wide(square, square_scale, table(False), block, wide).mul_(two).add_(x * x * rest_two)
        # PyTorch's own float32 root is a last digit off at times; that of float64, rounded, is not.
        deviation = v.double().sqrt().to(wide)
        step = m / deviation.mul_(root).add_(eps) * rate
        w.copy_(w.to(wide).mul_(keep).sub_(step))
        _round(m, mean, mean_scale, table(True), block)
        _round(v, square, square_scale, table(False), block)


_State = tuple[Tensor, Tensor]  # codes, scales


def _parts(
    weights: Tensor, gradients: Tensor, moments: Moments, block: int
) -> Iterator[tuple[Tensor, Tensor, _State, _State]]:
    """Views of whole blocks, of at most PIECE elements."""
    w, g, mean, square = (x.view(-1) for x in (weights, gradients, moments.mean, moments.square))
    blocks = max(1, PIECE // block)
    for number, first in enumerate(range(0, len(w), blocks * block)):
        here = slice(first, first + blocks * block)
        scales = slice(number * blocks, (number + 1) * blocks)
        yield (
            w[here], g[here], (mean[here], moments.mean_scale[scales]),
            (square[here], moments.square_scale[scales]),
        )  # fmt: skip


def _wide(codes: Tensor, scales: Tensor, one: Table, block: int, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for."""
    each = scales.to(dtype).repeat_interleave(block)[: len(codes)]
    return one.values.to(each)[codes.int()].mul_(each)


def _round(x: Tensor, codes: Tensor, scales: Tensor, one: Table, block: int) -> None:
    """Codes and scales anew. A block of zeros has the scale 0."""
    rows = x.new_zeros(len(scales) * block)
    rows[: len(x)] = x
    scales.copy_(rows.view(-1, block).abs().amax(1))
    by = 1 / scales.clamp(min=_TINY).to(x.dtype)
    codes.copy_(one.codes(x * by.repeat_interleave(block)[: len(x)]))


def _run(
    weights: Tensor,
    gradients: Tensor,
    mean: Tensor,
    mean_scale: Tensor,
    square: Tensor,
    square_scale: Tensor,
    block: int,
    numbers: list[float],
) -> None:
    if not native.reads(weights, gradients) or block > MOST:
        plain(weights, gradients, Moments(mean, mean_scale, square, square_scale), block, numbers)
        return
    tables, arithmetic = _tables(), torch.tensor(numbers, dtype=torch.float32)
    native.loaded().outsize_blockwise_adam(
        native.CODES[weights.dtype], native.CODES[gradients.dtype], weights.data_ptr(),
        gradients.data_ptr(), mean.data_ptr(), square.data_ptr(), mean_scale.data_ptr(),
        square_scale.data_ptr(), weights.numel(), block, tables.values.data_ptr(),
        tables.borders.data_ptr(), tables.buckets.data_ptr(), tables.first, tables.count,
        arithmetic.data_ptr(), native.threads(),
    )  # fmt: skip


@cache
def _tables_on(device: torch.device) -> Tensor:
    """Values of both tables, then their borders."""
    tables = _tables()
    return torch.cat((tables.values, tables.borders)).to(device)


def _on_device(
    weights: Tensor,
    gradients: Tensor,
    mean: Tensor,
    mean_scale: Tensor,
    square: Tensor,
    square_scale: Tensor,
    block: int,
    numbers: list[float],
) -> None:
    held = weights.dtype in native.COMPILED and gradients.dtype in native.COMPILED
    if not held or block > MOST or not native.compiles():
        plain(weights, gradients, Moments(mean, mean_scale, square, square_scale), block, numbers)
        return
    native.kernels("blockwise").update(
        weights, gradients, (mean, mean_scale), (square, square_scale),
        _tables_on(weights.device), block, numbers,
    )  # fmt: skip


def _defined() -> torch.library.Library:
    """The operator. On a device that has no kernel of it the twin runs."""
    made = native.define(_SCHEMA, _run, native.nothing)
    for key in accelerator.COMPILED.values():
        made.impl("blockwise_adam", _on_device, key)
    return made


_SCHEMA = (
    "blockwise_adam(Tensor(a!) weights, Tensor gradients, Tensor(b!) mean, Tensor(c!) mean_scale,"
    " Tensor(d!) square, Tensor(e!) square_scale, int block, float[] numbers) -> ()"
)
_OPERATOR = _defined()
