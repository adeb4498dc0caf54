"""What a product takes on a processor: a law that is fitted to the shapes a probe has measured.

No tiles of a processor are left empty as a GPU's are: a product takes a call, its operations at one
rate, and its operands and result at the rate at which caches and memory bring them. These three, by
dtype, are the least squares of relative errors, none below zero. How far measured shapes are from
the law is taken between them by distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from outsize.hardware.hardware import Matmul

LEAST = 5  # shapes: fewer say little of three rates
FAR = math.log(4) ** 2  # squared distance at which a shape says as much as the law does
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
Shape = tuple[int, int, int]  # T, I, O of (T, I) x (I, O)


@dataclass(frozen=True)
class Law:
    """Seconds of a call, of an operation, and of a byte that is read or written. shapes: measured,
    with the logarithm of their seconds over the law's."""

    call: float
    operation: float
    byte: float
    width: int
    shapes: tuple[tuple[Shape, float], ...] = ()

    def plain(self, shape: Shape) -> float:
        """Of any shape, by the law alone."""
        work, moved = _counted(shape, self.width)
        return self.call + work * self.operation + moved * self.byte

    def seconds(self, shape: Shape) -> float:
        """With what is left over nearby, in the logarithms of T, I and O: weights fall with the
        square of the distance. A measured shape takes what it took; far from all the law holds."""
        total, left = 1 / FAR, 0.0
        for known, off in self.shapes:
            far = sum(math.log(a / b) ** 2 for a, b in zip(shape, known, strict=True))
            if far == 0:
                return self.plain(known) * math.exp(off)
            total, left = total + 1 / far, left + off / far
        return self.plain(shape) * math.exp(left / total)


def laws(table: Sequence[Matmul]) -> Mapping[str, Law]:
    """By dtype, where enough shapes were measured."""
    dtypes = dict.fromkeys(entry.dtype for entry in table)
    every = {name: [entry for entry in table if entry.dtype == name] for name in dtypes}
    return {name: _fitted(of, BYTES.get(name, 2)) for name, of in every.items() if len(of) >= LEAST}


def _counted(shape: Shape, width: int) -> tuple[float, float]:
    """Operations, and bytes of both operands and the result."""
    T, I, O = shape  # noqa: E741
    return 2.0 * T * I * O, float(width * (T * I + I * O + T * O))


def _fitted(table: Sequence[Matmul], width: int) -> Law:
    shapes = [(entry.tokens, entry.d_in, entry.d_out) for entry in table]
    taken = np.array([entry.flops / entry.rate.value for entry in table])
    terms = np.array([(1.0, *_counted(shape, width)) for shape in shapes]) / taken[:, None]
    best, least = np.zeros(3), math.inf
    for count in (1, 2, 3):  # of all sets of terms the best whose rates are none below zero
        for kept in map(list, combinations(range(3), count)):
            found = np.linalg.lstsq(terms[:, kept], np.ones(len(table)), rcond=None)[0]
            left = float(((terms[:, kept] @ found - 1) ** 2).sum())
            if found.min() >= 0 and left < least:
                best, least = np.zeros(3), left
                best[kept] = found
    call, operation, byte = map(float, best)
    law = Law(call, operation, byte, width)
    off = [math.log(t / law.plain(shape)) for t, shape in zip(taken, shapes, strict=True)]
    return replace(law, shapes=tuple(zip(shapes, off, strict=True)))
