"""A machine as one of several workers has it, who share its processor and its memory."""

from __future__ import annotations

from dataclasses import replace

from outsize.hardware.hardware import Device, Hardware, Measured, Rate
from outsize.hardware.host import cores


def shared(hardware: Hardware, workers: int) -> Hardware:
    """What each of `workers` on one machine has of its processor: as much of everything, of rates
    that fewer threads than its cores measured as much as all cores would have, or the time that is
    granted of them. Where workers are more than those, calls take longer too."""
    device = hardware.devices[0]
    if workers == 1 or device.apart:
        return hardware
    part = 1.0 / workers
    has = device.granted or device.cores
    busy = min(device.threads or has, has)
    rate = min(1.0, has / busy * part) if busy else part
    mine = replace(
        scaled(device, rate, max(1.0, workers / max(1.0, has or cores()))),
        memory=_scaled(device.memory, part),
        visible=None if device.visible is None else _scaled(device.visible, part),
    )
    tiers = tuple(
        replace(tier, bytes=tier.bytes // workers) if tier.name == "device" else tier
        for tier in hardware.tiers
    )
    return replace(hardware, devices=(mine, *hardware.devices[1:]), tiers=tiers)


def scaled(device: Device, part: float, longer: float) -> Device:
    """A device with so much of each of its rates, whose calls take so many times as long."""
    return replace(
        device,
        bandwidth=_scaled(device.bandwidth, part),
        peak={dtype: _scaled(peak, part) for dtype, peak in device.peak.items()},
        measured=_measured(device.measured, part, longer),
    )


def _measured(measured: Measured, part: float, longer: float) -> Measured:
    overhead, handed = measured.overhead, measured.handed
    return Measured(
        tuple(replace(entry, rate=_scaled(entry.rate, part)) for entry in measured.matmul),
        tuple(replace(entry, rate=_scaled(entry.rate, part)) for entry in measured.attention),
        None if overhead is None else _scaled(overhead, longer),
        None if handed is None else _scaled(handed, longer),
    )


def _scaled(rate: Rate, factor: float) -> Rate:
    upto = None if rate.upto is None else rate.upto * factor
    return replace(rate, value=rate.value * factor, upto=upto)
