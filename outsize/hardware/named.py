"""Devices by name, for planning without them; the rows are in outsize/hardware/devices.py."""

from __future__ import annotations

from outsize.errors import OutsizeError, nearest
from outsize.hardware.devices import CORES, GIGA, MEBI, ROWS, TERA, Row, Span
from outsize.hardware.hardware import Device, Hardware, Link, Tier


def catalogue(name: str, count: int = 1) -> Hardware:
    """count devices of this name (upper or lower case) with their links.

    Raises OutsizeError with the nearest name for one that is not in the table.
    """
    key = known(name)
    row = ROWS[key]
    device = _device(key, row, count)
    fabric, span = row.fabric
    links = (
        Link(fabric, "devices", span.rate("B/s", GIGA, row.source, row.date)),
        Link("network", "nodes", row.nodes.rate("B/s", GIGA, row.source, row.date)),
    )
    tier = Tier("device", device.memory_bytes, device.bandwidth, device.bandwidth)
    return Hardware((device,), (tier,), links, "catalogue")


def known(name: str) -> str:
    """A device's name as the catalogue has it, from any case. Raises OutsizeError for others."""
    found = {key.upper(): key for key in ROWS}.get(name.upper())
    if found is None:
        said = f"{name.upper()}-"
        longer = [
            repr(key)
            for key in ROWS
            if key.upper().startswith(said) or said.startswith(f"{key.upper()}-")
        ]
        meant = f"; did you mean {' or '.join(longer)}?" if longer else nearest(name, names())
        raise OutsizeError(f"device {name!r} is not in the catalogue{meant}")
    return found


def names() -> tuple[str, ...]:
    """Every name that catalogue() knows."""
    return tuple(ROWS)


def _device(name: str, row: Row, count: int) -> Device:
    said = (row.source, row.date)
    visible = None if row.visible is None else Span(row.visible).rate("B", MEBI, *said)
    return Device(
        name=name,
        kind=row.kind,
        memory=row.memory.rate("B", GIGA, *said),
        peak={dtype: span.rate("FLOP/s", TERA, *said) for dtype, span in row.peak.items()},
        bandwidth=row.bandwidth.rate("B/s", TERA, *said),
        count=count,
        visible=visible,
        note=row.note,
        watts=None if row.watts is None else Span(row.watts).rate("W", 1, *said),
        array=row.array,
        cores=CORES.get(name, 0),
        banks=row.banks,
    )
