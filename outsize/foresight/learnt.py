"""A cost source that is learnt from a probe's samples: an operator's text in, seconds out.

Das and Mannarswamy, "ML-driven Hardware Cost Model for MLIR", 2023, read an operator as a text and
learn its cost. Here a text is a line such as "mm fp32 512 768 3072": its words are features of
their own, its numbers logarithms, and what divides them words again. Learnt is how far a sample is
from the roofline, by kernel ridge regression, so that beside all samples the roofline is left. What
each sample would have been without itself has a closed form; the kernel's width and ridge are those
of the least such error. The model stands in for the roofline, away from shapes that were measured,
and only where that error is less than the roofline's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from outsize.foresight.constants import Array
from outsize.foresight.sources import Cost, CostSource, Processor, Roofline, Table
from outsize.hardware.hardware import Device, Measured

LEAST = 12  # samples: of fewer, errors of those held out say little
WORTH = 0.9  # of the roofline's error: less than a tenth is a chance's
WIDTHS, RIDGES = (1.0, 2.0, 4.0, 8.0), (1e-3, 1e-2, 1e-1)
LEVEL = 4.0  # of the kernel: what all samples have in common
DIVISORS = (8, 16, 64)


@dataclass(frozen=True)
class Fit:
    """A model of the logarithm of seconds over the roofline's. off: of each sample the relative
    error, held out."""

    words: tuple[str, ...]
    points: Array
    weights: Array
    width: float
    off: Array

    def __call__(self, text: str) -> float:
        """By how much the roofline's seconds are multiplied."""
        near = _kernel(features(text, self.words)[None], self.points, self.width)
        return math.exp(float(near[0] @ self.weights))

    @property
    def error(self) -> float:
        """The mean of all."""
        return float(self.off.mean())


def features(text: str, words: Sequence[str]) -> Array:
    """Numbers by place, in logarithms of two; then whether each of the words is there."""
    every = text.split()
    numbers = [int(word) for word in every if word.isdecimal()]
    has = {word for word in every if not word.isdecimal()} | {
        f"{place}:{by}" for place, n in enumerate(numbers) for by in DIVISORS if n % by == 0
    }
    logs = [math.log2(max(1, n)) for n in (*numbers, 1, 1, 1)[:3]]
    return np.array([*logs, *(2.0 * (word in has) for word in words)])


def vocabulary(texts: Sequence[str]) -> tuple[str, ...]:
    """Words of texts, and what may divide their numbers."""
    plain = {word for text in texts for word in text.split() if not word.isdecimal()}
    return (*sorted(plain), *(f"{place}:{by}" for place in range(3) for by in DIVISORS))


def _kernel(one: Array, other: Array, width: float) -> Array:
    apart = ((one[:, None] - other[None]) ** 2).sum(-1)
    found: Array = np.exp(-apart / (2 * width * width)) + LEVEL
    return found


def fit(texts: tuple[str, ...], logs: tuple[float, ...]) -> Fit:
    """Of samples, by their texts and the logarithms of their seconds over the roofline's."""
    words = vocabulary(texts)
    points, values = np.stack([features(text, words) for text in texts]), np.array(logs)
    best: Fit | None = None
    for width, ridge in product(WIDTHS, RIDGES):
        inverse = np.linalg.inv(_kernel(points, points, width) + ridge * np.eye(len(values)))
        weights = inverse @ values
        made = Fit(words, points, weights, width, np.abs(np.expm1(-weights / inverse.diagonal())))
        if best is None or made.error < best.error:
            best = made
    assert best is not None, "there are widths and ridges"
    return best


@dataclass(frozen=True)
class Learnt:
    """What was learnt of a device's products (`learnt`); anything else from another source."""

    device: Device
    other: CostSource
    model: Fit

    def product(self, m: int, n: int, k: int, dtype: str) -> Cost:
        if not any(one.dtype == dtype for one in self.device.measured.matmul):
            return self.other.product(m, n, k, dtype)
        sheet = Roofline(self.device).product(m, n, k, dtype)
        seconds, off = sheet.seconds * self.model(_product(m, n, k, dtype)), self.model.error
        said = f"learnt from {len(self.model.points)} samples of {self.device.name}"
        return Cost(seconds, seconds / (1 + 2 * off), seconds * (1 + 2 * off), said)

    def attention(self, operations: float, size: tuple[int, int], kernel: str, back: bool) -> Cost:
        return self.other.attention(operations, size, kernel, back)

    def traffic(self, moved: float) -> Cost:
        return self.other.traffic(moved)


def learnt(device: Device) -> Fit:
    """Of a device's measured products."""
    texts, seconds, sheets = zip(*samples(device), strict=True)
    return fit(texts, tuple(math.log(a / b) for a, b in zip(seconds, sheets, strict=True)))


def samples(device: Device) -> list[tuple[str, float, float]]:
    """A probe's products: text, seconds, seconds of the roofline."""
    sheet, found = Roofline(device), []
    for one in device.measured.matmul:
        size = one.tokens, one.d_out, one.d_in
        found.append(
            (_product(*size, one.dtype), one.flops / one.rate.value,
             sheet.product(*size, one.dtype).seconds)
        )  # fmt: skip
    return found


def _product(m: int, n: int, k: int, dtype: str) -> str:
    return f"mm {dtype} {m} {n} {k}"


def held_out(device: Device, made: Fit) -> dict[str, float]:
    """Median relative errors of a device's measured products, each held out: of the roofline, of a
    table of the others, of a processor also of the law of these, and of `made`, which is learnt."""
    table = device.measured.matmul
    off: dict[str, list[float]] = {"roofline": [], "table": []}
    for at, one in enumerate(table):
        others = Measured((*table[:at], *table[at + 1 :]))
        sheet, seconds = Roofline(device), one.flops / one.rate.value
        bare = replace(device, measured=others)
        asked: dict[str, CostSource] = {"roofline": sheet, "table": Table(bare, sheet)}
        if not device.apart:
            asked["law"] = Processor(bare, sheet)
        for name, source in asked.items():
            seen = source.product(one.tokens, one.d_out, one.d_in, one.dtype).seconds
            off.setdefault(name, []).append(abs(seen / seconds - 1))
    found = {name: float(np.median(each)) for name, each in off.items()}
    return {**found, "learnt": float(np.median(made.off))}


@lru_cache(maxsize=64)
def better(device: Device) -> Fit | None:
    """What is learnt of a device, where it errs clearly less, held out, than its roofline, or the
    law of a processor."""
    if len(device.measured.matmul) < LEAST:
        return None
    made = learnt(device)
    off = held_out(device, made)
    return made if off["learnt"] < WORTH * min(off["roofline"], off.get("law", math.inf)) else None
