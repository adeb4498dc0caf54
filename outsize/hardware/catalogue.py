"""Devices by name, for planning without them: dense rates per device, links in one direction.

The table is the project's hardware table (vendor data sheets and the papers it names). Entries
that were recalled and not checked say so in their note; a range keeps its lower end as value.
Memory as sold is counted in powers of ten, the smaller reading; where the bytes that a process
sees are known they are given as well, and a plan uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.errors import OutsizeError, nearest
from outsize.hardware.hardware import Device, Hardware, Link, Rate, Tier

SOURCE = "project hardware table, from vendor data sheets"
DATE = "2026-11-20"
RECALLED = "recalled, not checked"
TERA, GIGA, MEBI = 1e12, 1e9, 1024.0**2


@dataclass(frozen=True)
class Span:
    """A figure as tables give it: one number or a range, perhaps with a remark."""

    low: float
    high: float | None = None
    note: str = ""

    def rate(self, unit: Literal["FLOP/s", "B/s", "B"], scale: float) -> Rate:
        """The figure in base units."""
        upto = None if self.high is None else self.high * scale
        return Rate(self.low * scale, unit, SOURCE, DATE, upto=upto, note=self.note)


@dataclass(frozen=True)
class Row:
    """One device: TFLOP/s by dtype, memory in GB and TB/s, links by name in GB/s, MiB visible."""

    peak: dict[str, Span]
    memory: Span
    bandwidth: Span
    fabric: tuple[str, Span]
    nodes: Span
    visible: int | None = None  # MiB
    note: str = ""


def _hopper(memory: float, bandwidth: float, note: str = "") -> Row:
    """The SXM boards of one chip, which differ in their memory."""
    peak = {"bf16": Span(989, note=note), "fp8": Span(1979)}
    return Row(peak, Span(memory), Span(bandwidth), ("nvlink", Span(450)), Span(50))


def _volta(memory: float) -> Row:
    peak = {"fp16": Span(125)}
    nodes = Span(1.6, 6, "1 to 4 links of 100 Gb/s for 8 devices")
    fabric = ("nvlink", Span(150))
    return Row(peak, Span(memory), Span(0.90), fabric, nodes, note="no bf16")


def _grace(fp4: float, memory: float, visible: int | None) -> Row:
    """A Blackwell device of a 72-device domain."""
    peak = {"bf16": Span(2500), "fp8": Span(5000), "fp4": Span(fp4)}
    fabric = ("nvlink", Span(900, note="in a domain of 72 devices"))
    return Row(peak, Span(memory), Span(8.0), fabric, Span(50, 100), visible)


ROWS = {
    "V100-SXM2-16": _volta(16),
    "V100-SXM2-32": _volta(32),
    "A100-SXM-40": Row({"bf16": Span(312)}, Span(40), Span(1.555), ("nvlink", Span(300)), Span(25)),
    "A100-SXM-80": Row({"bf16": Span(312)}, Span(80), Span(2.039), ("nvlink", Span(300)), Span(25)),
    "A100-PCIe-80": Row(
        {"bf16": Span(312)},
        Span(80),
        Span(1.935),
        ("pcie4", Span(32, 300, "300 with a bridge between a pair, else PCIe 4")),
        Span(12.5, 25),
    ),
    "H100-SXM": _hopper(80, 3.35),
    "H100-SXM-96": _hopper(96, 2.4, "at most, at 500 W"),
    "H100-PCIe": Row(
        {"bf16": Span(756), "fp8": Span(1513)},
        Span(80),
        Span(2.0),
        ("pcie5", Span(64)),
        Span(25, 50),
    ),
    "H200": _hopper(141, 4.8),
    "B200-SXM": Row(
        {"bf16": Span(2250), "fp8": Span(4500), "fp4": Span(9000)},
        Span(180, 192),
        Span(7.7, 8.0),
        ("nvlink", Span(900)),
        Span(50, 100),
    ),
    "B300-SXM": Row(
        {"bf16": Span(2250), "fp8": Span(4500), "fp4": Span(13500, note=RECALLED)},
        Span(288),
        Span(7.75, 8.0),
        ("nvlink", Span(900)),
        Span(100),
        visible=275_040,
    ),
    "GB200": _grace(10_000, 185, 189_471),
    "GB300": _grace(15_000, 277, None),
    "MI250X": Row(
        {"bf16": Span(383)},
        Span(128),
        Span(3.2),
        ("fabric", Span(50, 100, "two chips on one board 200")),
        Span(25, note=f"two chips of 12.5 each, {RECALLED}"),
        note="a board of two chips, each seen as a device; see MI250X-GCD",
    ),
    "MI250X-GCD": Row(
        {"bf16": Span(191.5)},
        Span(64),
        Span(1.6),
        ("fabric", Span(50, 200, "200 to the other chip of the board, others 50 to 100")),
        Span(12.5, note=f"4 x 25 GB/s for a node of 8 chips, {RECALLED}"),
        note="one of the two chips of a board",
    ),
    "MI300X": Row(
        {"bf16": Span(1307), "fp8": Span(2614)},
        Span(192),
        Span(5.3),
        ("fabric", Span(448, note="7 links of 64")),
        Span(50),
    ),
    "RTX-4090": Row(
        {"bf16": Span(165), "fp8": Span(330), "fp16-acc16": Span(330)},
        Span(24),
        Span(1.008),
        ("pcie4", Span(32, note="x16, no peer to peer")),
        Span(1, 12, RECALLED),
    ),
    "L40S": Row(
        {"bf16": Span(362), "fp8": Span(733)}, Span(48), Span(0.864), ("pcie4", Span(32)), Span(25)
    ),
}


def catalogue(name: str, count: int = 1) -> Hardware:
    """count devices of this name (upper or lower case) with their links.

    Raises OutsizeError with the nearest name for one that is not in the table.
    """
    key = name.upper().replace("PCIE", "PCIe")
    if key not in ROWS:
        raise OutsizeError(f"device {name!r} is not in the catalogue{nearest(key, names())}")
    device = _device(key, ROWS[key], count)
    fabric, span = ROWS[key].fabric
    links = (
        Link(fabric, "devices", span.rate("B/s", GIGA)),
        Link("network", "nodes", ROWS[key].nodes.rate("B/s", GIGA)),
    )
    tier = Tier("device", device.memory_bytes, device.bandwidth, device.bandwidth)
    return Hardware((device,), (tier,), links, "catalogue")


def names() -> tuple[str, ...]:
    """Every name that catalogue() knows."""
    return tuple(ROWS)


def _device(name: str, row: Row, count: int) -> Device:
    visible = None if row.visible is None else Span(row.visible).rate("B", MEBI)
    return Device(
        name=name,
        kind="gpu",
        memory=row.memory.rate("B", GIGA),
        peak={dtype: span.rate("FLOP/s", TERA) for dtype, span in row.peak.items()},
        bandwidth=row.bandwidth.rate("B/s", TERA),
        count=count,
        visible=visible,
        note=row.note,
    )
