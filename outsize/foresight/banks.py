"""Memory that multiplies where it lies: what a product takes in the banks that hold its matrix.

Each bank of a processing-in-memory device has multipliers at its row buffer (Lee et al., "A 1ynm
1.25V 8Gb 16Gb/s/pin GDDR6-based Accelerator-in-Memory", 2022). A matrix lies spread over all banks,
its columns in turn, each behind the other in rows, so that a vector passes every row once (Wu et
al., "PIM-GPT", 2024). Nothing is used twice: so many vectors take so many times as long, and what
is no product passes the pins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.foresight.sources import BYTES, SPREAD, Cost
from outsize.hardware.hardware import Banks, Device


@dataclass(frozen=True)
class InMemory:
    """The price of a device that has `banks`."""

    device: Device

    def product(self, m: int, n: int, k: int, dtype: str) -> Cost:
        """(m, k) vectors by (k, n): columns on the fullest bank, and vectors in and out over the
        pins."""
        size = self._known(dtype)
        mine = math.ceil(n / self.banks.count) * k * size
        moved = (k + n) * size / self.device.bandwidth.value
        return self._cost(m * (self._read(mine) + moved))

    def attention(self, operations: float, size: tuple[int, int], kernel: str, back: bool) -> Cost:
        """Keys and values are matrices too, which all banks share: two operations an element."""
        elements = operations / 2 / self.banks.count
        return self._cost(self._read(elements * self._known("bf16")))

    def traffic(self, moved: float) -> Cost:
        """Over the pins, to what computes beside the memory."""
        return self._cost(moved / self.device.bandwidth.value)

    @property
    def banks(self) -> Banks:
        assert self.device.banks is not None, "a device with banks"
        return self.device.banks

    def _read(self, nbytes: float) -> float:
        """Seconds in which a bank multiplies so many bytes of its own, row by row."""
        of = self.banks
        return math.ceil(nbytes / of.width) * of.cycle + math.ceil(nbytes / of.row) * of.opening

    def _known(self, dtype: str) -> float:
        if dtype not in self.device.peak:
            known = ", ".join(self.device.peak)
            raise OutsizeError(f"device {self.device.name}: no rate in {dtype}; it has {known}")
        return float(BYTES[dtype])

    def _cost(self, seconds: float) -> Cost:
        said = f"banks of {self.device.name} ({self.device.bandwidth.source})"
        return Cost(seconds, seconds, seconds * (1 + 2 * SPREAD), said)
