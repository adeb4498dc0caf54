"""Random numbers that are a function of (seed, name, element index) and of nothing else.

Any slice made alone equals the slice of the whole, bitwise, whatever the mesh, the order and the
machine. One pass in C++ makes them (outsize/kernels/normal.cpp), or its twin here in numpy, to
the same bits. Element i takes the i-th 64 random bits of a Philox stream (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011) keyed by a hash of seed and name, and turns them into a
normal by Box and Muller's transform (1958). Logarithm and sine are made here from additions,
multiplications, divisions and square roots, which IEEE 754 rounds in one way only: a library's own
differ in the last bit between processors, and between the body and the tail of a vector loop.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outsize.kernels import native
from outsize.kernels.pieces import pieces
from outsize.torch_private import FakeTensor

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

_BLOCK = 8192  # elements computed at a time: temporaries of 64 KiB each stay in the core's cache
_PER_COUNT = 4  # 64-bit words that one count of Philox gives
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2) in float64
_MANTISSA = 52  # bits of a float64's mantissa
_LOG_2 = 0.6931471805599453
_LOG = [2 / (2 * k + 1) for k in range(12)]  # log((1+s)/(1-s)) = s * sum of these * s^2k
_SINE = [
    (-1) ** k / math.factorial(2 * k + 1) for k in range(12)
]  # sin z = z * sum of these * z^2k
_ANGLE = (math.pi * 2.0**-32, math.pi * (2.0**-33 - 0.5))  # of a 32-bit number: step and shift
_CONSTANTS = np.array([*_ANGLE, _LOG_2, *_LOG, *_SINE])  # as normal.cpp reads them
_FLOAT64 = 2  # normal.cpp's number for it


def bits(seed: int, name: str, start: int, stop: int) -> Words:
    """Elements start..stop of the stream, 64 random bits each."""
    words: Words = _stream(seed, name, start).random_raw(stop - start)
    return words


def uniform(seed: int, name: str, start: int, stop: int) -> Floats:
    """Elements start..stop of the stream, float64 in [0, 1)."""
    return (bits(seed, name, start, stop) >> 11).astype(np.float64) * 2.0**-53


def normal(seed: int, name: str, start: int, stop: int) -> Floats:
    """Elements start..stop of the stream, float64, mean 0, deviation 1, at most 6.8 from 0."""
    if native.library() is None:
        return plain_normal(seed, name, start, stop)
    made = np.empty(stop - start)
    _native(_FLOAT64, made.ctypes.data, seed, name, start, len(made), 1.0)
    return made


def plain_normal(seed: int, name: str, start: int, stop: int) -> Floats:
    """The twin of outsize_normal."""
    return _draw_normal(_stream(seed, name, start), stop - start)


def fill_normal(out: Tensor, seed: int, name: str, start: int = 0, std: float = 1.0) -> Tensor:
    """Fill `out`, in row-major order, with `std` times elements start.. of the normal stream.

    `out` may have any floating dtype, device and strides; needs a few megabytes beside it.
    """
    flat = out.detach()
    if native.reads(flat) and flat.is_contiguous() and not isinstance(flat, FakeTensor):
        code = native.CODES[flat.dtype]
        _native(code, flat.data_ptr(), seed, name, start, flat.numel(), std)
        return out
    for piece in pieces(flat):
        values = normal(seed, name, start, start + piece.numel())
        values *= std
        piece.copy_(torch.from_numpy(values).view(piece.shape))
        start += piece.numel()
    return out


def fill_uniform(out: Tensor, seed: int, name: str, bound: float, start: int = 0) -> Tensor:
    """Fill `out`, in row-major order, with elements start.. of the uniform stream spread over
    [-bound, bound)."""
    stream = _stream(seed, name, start)
    for piece in pieces(out.detach()):
        values = (stream.random_raw(piece.numel()) >> 11).astype(np.float64)
        values *= bound * 2.0**-52
        values -= bound
        piece.copy_(torch.from_numpy(values).view(piece.shape))
    return out


def _native(
    code: int, address: int, seed: int, name: str, start: int, count: int, std: float
) -> None:
    """Write `count` numbers to an address, in the dtype that normal.cpp knows by a code."""
    words = np.frombuffer(_key(seed, name), dtype=np.uint64)
    native.loaded().outsize_normal(
        code, address, start, count, words.ctypes.data, std, _CONSTANTS.ctypes.data,
        native.threads(),
    )  # fmt: skip


def _key(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()


def _stream(seed: int, name: str, start: int) -> np.random.Philox:
    """The bit generator of (seed, name), about to give the word of element `start`."""
    stream = np.random.Philox(key=int.from_bytes(_key(seed, name), "little"))
    stream.advance(start // _PER_COUNT)
    stream.random_raw(start % _PER_COUNT)
    return stream


def _draw_normal(stream: np.random.Philox, count: int) -> Floats:
    values = np.empty(count)
    for at in range(0, count, _BLOCK):
        values[at : at + _BLOCK] = _to_normal(stream.random_raw(min(_BLOCK, count - at)))
    return values


def _to_normal(words: Words) -> Floats:
    """Radius from the high 32 bits, angle in (-pi/2, pi/2) from the low ones: its sine has the
    distribution of the cosine of an angle drawn from the whole circle."""
    radius = _log((words >> 32).astype(np.float64) * 2.0**-32 + 2.0**-33)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = (words & 0xFFFFFFFF).astype(np.float64) * _ANGLE[0]
    angle += _ANGLE[1]
    radius *= _odd_series(angle, _SINE)
    return radius


def _log(x: Floats) -> Floats:
    """Natural logarithm of normal positive numbers: x = 2^k m with m within sqrt(1/2)..sqrt(2)."""
    bits = x.view(np.int64)
    k = (bits - _SQRT_HALF) >> _MANTISSA
    m = (bits - (k << _MANTISSA)).view(np.float64)
    log = _odd_series((m - 1) / (m + 1), _LOG)
    log += k * _LOG_2
    return log


def _odd_series(x: Floats, terms: list[float]) -> Floats:
    """x times the polynomial in x^2 with coefficients `terms`, constant first."""
    square = x * x
    total = np.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        total *= square
        total += term
    total *= x
    return total
