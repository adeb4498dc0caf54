"""A machine's rates as a probe would give them, without the second or two of measuring."""

from __future__ import annotations

from typing import Any

from outsize.hardware import Hardware, Measured, Rate, Tier
from outsize.hardware.hardware import Device


def known_hardware() -> Hardware:
    """One CPU of plausible rates."""

    def rate(value: float, unit: Any) -> Rate:
        return Rate(value, unit, "test", "2026-11-20")

    device = Device(
        "test",
        "cpu",
        rate(8e9, "B"),
        {"fp32": rate(1e11, "FLOP/s"), "bf16": rate(1.1e11, "FLOP/s")},
        rate(2e10, "B/s"),
        measured=Measured(overhead=rate(1e-6, "s")),
    )
    return Hardware((device,), (Tier("device", 8 * 10**9),), (), "test")
