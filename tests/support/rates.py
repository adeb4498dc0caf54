"""A machine's rates as a probe would give them, without the second or two of measuring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outsize.hardware import Hardware, Measured, Rate, Tier
from outsize.hardware.hardware import Device


def rate(value: float, unit: Any) -> Rate:
    return Rate(value, unit, "test", "2026-11-20")


def known_hardware() -> Hardware:
    """One CPU of plausible rates."""

    device = Device(
        "test",
        "cpu",
        rate(8e9, "B"),
        {"fp32": rate(1e11, "FLOP/s"), "bf16": rate(1.1e11, "FLOP/s")},
        rate(2e10, "B/s"),
        measured=Measured(overhead=rate(1e-6, "s")),
    )
    return Hardware((device,), (Tier("device", 8 * 10**9),), (), "test")


def known_machine() -> Hardware:
    """The same with the other tiers that a probe finds."""
    copied = rate(5e9, "B/s")
    others = (Tier("host", 0, copied, copied), Tier("disk", 0))
    return replace(known_hardware(), tiers=(Tier("device", 0), *others))
