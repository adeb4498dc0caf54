"""Where seconds come from: one protocol, and layers of it that know more and more.

A Roofline prices a call by what the device does in tiles and waves, or in the cells of a systolic
array; a Table by what was measured of shapes like it, and asks another source for the rest. What is
left over, by device and by software, is a small fitted residual (outsize/foresight/constants.py).
Every price says where it comes from and within what it is held to lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

from outsize.errors import OutsizeError
from outsize.hardware.hardware import Device


class Cost(NamedTuple):
    """Seconds, the interval they are held to lie in, and who says so."""

    seconds: float
    low: float
    high: float
    source: str

    def times(self, factor: float) -> Cost:
        """So many calls one after the other."""
        return Cost(self.seconds * factor, self.low * factor, self.high * factor, self.source)


class CostSource(Protocol):
    """What calls take on one device, in seconds."""

    def product(self, m: int, n: int, k: int, dtype: str) -> Cost:
        """(m, k) x (k, n)."""
        ...

    def attention(self, operations: float, size: tuple[int, int], kernel: str, back: bool) -> Cost:
        """Of a fused kernel, for so many operations that are not masked. size: of the sequence and
        of a head."""
        ...

    def traffic(self, moved: float) -> Cost:
        """Of elementwise work that reads and writes so many bytes."""
        ...


# Tiles of a product's output that libraries have kernels for, and the part of the peak that one
# reaches at best: a smaller tile reads its operands more often (NVIDIA, Matrix multiplication
# background user's guide, 2023).
TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.88), (64, 256, 0.8), (256, 64, 0.8),
    (64, 128, 0.7), (128, 64, 0.7), (64, 64, 0.55), (32, 128, 0.45),
)  # fmt: skip
# Parts of the peak by the largest power of two that divides all sizes, below whole lines
# of 128 bytes (Anthony et al., The case for co-designing model architectures with hardware, 2024).
LINES = {64: 1.0, 32: 0.95, 16: 0.9, 8: 0.8}
RAGGED = 0.5  # of other sizes
# What a tile's first loads and its last store cost: of the inner dimension, on a core of so many
# FLOP/s, an A100's. They wait for memory, whose latency is alike on all: a core that is five times
# as fast loses five times as much of the inner dimension.
RAMP, RAMP_BY = 64, 312e12 / 108
SPREAD = 0.25  # of a roofline's price without a residual, either way
# Parts of the peak by kernel, forward and back: FlashAttention (Dao et al., 2022), FlashAttention-2
# (Dao, 2023), on an A100 at sizes of 128.
# Dao et al., FlashAttention-3 (2024), on an H100: what cuDNN 9 has too.
# Its kernel in Triton (flash_attn_triton.py) lies between the first two: the second is 1.3 to 2.5
# times as fast as it, 1.7 to 3 times as the first (Dao, 2023, 4.1).
KERNELS = {
    "flash": (0.65, 0.58), "flash1": (0.45, 0.35), "triton": (0.5, 0.4), "flash3": (0.66, 0.56),
}  # fmt: skip
SHORT = 400  # tokens of a sequence at which half of a kernel's rate is reached (the same papers)
BYTES = {
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp8-rows": 1,
    "mxfp8": 1,
    "nvfp4": 0.5,
}
# A dtype that a device's sheet does not name has the rate of another one.
LIKE = {"fp8-rows": "fp8", "fp16": "bf16", "bf16": "fp16", "mxfp8": "fp8", "nvfp4": "fp4"}


@dataclass(frozen=True)
class Roofline:
    """The device's sheet, less what shapes cost. scores: the dtype that attention computes in."""

    device: Device
    scores: str = "bf16"

    def product(self, m: int, n: int, k: int, dtype: str) -> Cost:
        """Operations at the peak by tiles and waves, or the bytes, whichever takes longer."""
        fill = self._fill(m, n, k, dtype)
        computing = 2.0 * m * n * k / (self.peak(dtype) * fill)
        moved = (m * k + k * n) * BYTES[dtype] + 2.0 * m * n
        return self._cost(max(computing, moved / self.device.bandwidth.value))

    def attention(self, operations: float, size: tuple[int, int], kernel: str, back: bool) -> Cost:
        """Small heads leave part of a tile's inner products empty."""
        sequence, head = size
        part = KERNELS[kernel][back] * min(1.0, (head / 128) ** 0.15)
        part *= sequence / (sequence + SHORT)
        return self._cost(operations / (self.peak(self.scores) * part))

    def traffic(self, moved: float) -> Cost:
        return self._cost(moved / self.device.bandwidth.value)

    def peak(self, dtype: str) -> float:
        """FLOP/s, dense. Raises OutsizeError for a dtype that the device does not compute in."""
        for name in (dtype, LIKE.get(dtype, "")):
            if name in self.device.peak:
                return self.device.peak[name].value
        known = ", ".join(self.device.peak)
        raise OutsizeError(f"device {self.device.name}: no rate in {dtype}; it has {known}")

    def _fill(self, m: int, n: int, k: int, dtype: str) -> float:
        if self.device.array:
            return systolic(m, n, k, self.device.array)
        line, cores = math.gcd(m, n, k, 64), self.device.cores
        core = self.peak(dtype) / cores if cores else RAMP_BY
        return tiled(m, n, cores) * LINES.get(line, RAGGED) * k / (k + RAMP * core / RAMP_BY)

    def _cost(self, seconds: float) -> Cost:
        said = f"roofline of {self.device.name} ({self.device.bandwidth.source})"
        return Cost(seconds, seconds, seconds * (1 + 2 * SPREAD), said)


@lru_cache(maxsize=1 << 16)
def tiled(m: int, n: int, cores: int) -> float:
    """The part of the peak that a product reaches: of its best tile what covers the output, times
    what of the last wave of tiles over the cores is in use. cores 0: unknown, no waves."""
    best = 0.0
    for high, wide, part in TILES:
        tiles = math.ceil(m / high) * math.ceil(n / wide)
        waves = math.ceil(tiles / cores) * cores if cores else tiles
        best = max(best, part * m * n / (waves * high * wide))
    return best


def systolic(m: int, n: int, k: int, side: int) -> float:
    """The part of the peak of an array of side x side cells that holds weights: the cells that have
    one, times the cycles in which rows pass, of those in which they enter and leave too."""
    held = k * n / (math.ceil(k / side) * math.ceil(n / side) * side * side)
    return held * m / (m + 2 * side - 2)


@dataclass(frozen=True)
class Processor:
    """What a law makes of a processor's measured products, in dtypes that have one; anything else
    from another source."""

    device: Device
    other: CostSource

    def product(self, m: int, n: int, k: int, dtype: str) -> Cost:
        law = self.device.measured.laws.get(dtype)
        if law is None:
            return self.other.product(m, n, k, dtype)
        seconds = law.plain((m, k, n))
        said = f"fitted to {len(law.shapes)} products measured on {self.device.name}"
        return Cost(seconds, seconds * (1 - SPREAD), seconds * (1 + SPREAD), said)

    def attention(self, operations: float, size: tuple[int, int], kernel: str, back: bool) -> Cost:
        return self.other.attention(operations, size, kernel, back)

    def traffic(self, moved: float) -> Cost:
        return self.other.traffic(moved)


def sheet_of(device: Device, scores: str = "bf16") -> CostSource:
    """What prices shapes that were not measured: the device's sheet, or a processor's law."""
    sheet = Roofline(device, scores)
    return sheet if device.apart else Processor(device, sheet)


@dataclass(frozen=True)
class Table:
    """Products by shape as they were measured on the device, where the table has their dtype and
    shapes within a factor of four, and attention where it was measured in its dtype (`scores`);
    anything else from another source."""

    device: Device
    other: CostSource
    scores: str = "bf16"

    def product(self, m: int, n: int, k: int, dtype: str) -> Cost:
        if not self._near(m, n, k, dtype):
            return self.other.product(m, n, k, dtype)
        measured = self.device.measured
        if not self.device.apart:
            return self._cost(measured.product_seconds((m, k, n), dtype)[0])
        return self._cost(2.0 * m * n * k / measured.matmul_rate(m, k, n, dtype))

    def attention(self, operations: float, size: tuple[int, int], kernel: str, back: bool) -> Cost:
        known = (self.scores, "backward" if back else "forward")
        for entry in self.device.measured.attention:
            if (entry.dtype, entry.direction) == known:
                return self._cost(operations / entry.rate.value)
        return self.other.attention(operations, size, kernel, back)

    def traffic(self, moved: float) -> Cost:
        return self.other.traffic(moved)

    def _cost(self, seconds: float) -> Cost:
        return Cost(seconds, seconds * 0.9, seconds * 1.1, f"measured on {self.device.name}")

    @cached_property
    def _shapes(self) -> dict[str, list[tuple[int, int, int]]]:
        found: dict[str, list[tuple[int, int, int]]] = {}
        for entry in self.device.measured.matmul:
            found.setdefault(entry.dtype, []).append((entry.tokens, entry.d_out, entry.d_in))
        return found

    def _near(self, m: int, n: int, k: int, dtype: str) -> bool:
        return any(
            all(1 / 4 <= one / other <= 4 for one, other in zip((m, n, k), shape, strict=True))
            for shape in self._shapes.get(dtype, ())
        )


def source_of(device: Device, scores: str = "bf16") -> CostSource:
    """The best that is known of a device: its measured shapes, and of others what is learnt of them
    where that errs less than its sheet; else its sheet, or its banks. scores: the dtype of
    attention; 16 bits on a device that has no rate in it."""
    if device.banks is not None:
        from outsize.foresight.banks import InMemory  # which has its Cost from here

        return InMemory(device)
    known = device.peak if device.apart else {entry.dtype for entry in device.measured.attention}
    scores = scores if scores in known else "bf16"
    sheet = sheet_of(device, scores)
    if not device.measured.matmul:
        return sheet
    from outsize.foresight.learnt import Learnt, better  # as above

    made = better(device)
    return Table(device, sheet if made is None else Learnt(device, sheet, made), scores)
