"""The rows of the catalogue: dense rates per device, links in one direction, each with its source.

Where a row names no source it is the project's hardware table (vendor data sheets and the papers it
names). Entries that were recalled and not checked say so in their note; a range keeps its lower end
as value. Memory as sold is counted in powers of ten, the smaller reading; where the bytes that a
process sees are known they are given as well, and a plan uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.hardware.hardware import Banks, Kind, Rate, Unit

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

    def rate(self, unit: Unit, scale: float, source: str = SOURCE, date: str = DATE) -> Rate:
        """The figure in base units."""
        upto = None if self.high is None else self.high * scale
        return Rate(self.low * scale, unit, source, date, upto=upto, note=self.note)


@dataclass(frozen=True)
class Row:
    """One device: TFLOP/s by dtype, memory in GB and TB/s, links by name in GB/s, MiB visible.

    fabric: of one device to all others that it joins, which are `domain` of them (0: as many as
    there are); torus: so many dimensions, two links each. watts: of the board under load.
    """

    peak: dict[str, Span]
    memory: Span
    bandwidth: Span
    fabric: tuple[str, Span]
    nodes: Span
    visible: int | None = None  # MiB
    note: str = ""
    domain: int = 8
    torus: int = 0
    watts: float | None = None
    kind: Kind = "gpu"
    array: int = 0  # rows and columns of a systolic array
    banks: Banks | None = None
    source: str = SOURCE
    date: str = DATE


def _hopper(memory: float, bandwidth: float, note: str = "") -> Row:
    """The SXM boards of one chip, which differ in their memory."""
    peak = {"bf16": Span(989, note=note), "fp8": Span(1979)}
    watts = 500 if note else 700
    links = (("nvlink", Span(450)), Span(50))
    visible = {80: 81_009, 96: 96_768}.get(int(memory))
    return Row(peak, Span(memory), Span(bandwidth), *links, visible, watts=watts)


def _ampere(
    memory: float, bandwidth: float, visible: int, fabric: float = 300, note: str = ""
) -> Row:
    """visible: as PyTorch reports it where memory runs out."""
    link, peak = ("nvlink", Span(fabric, note=note)), {"bf16": Span(312)}
    source = "NVIDIA A800 data sheet, 2023" if note else SOURCE
    return Row(
        peak, Span(memory), Span(bandwidth), link, Span(25), visible, note, watts=400, source=source
    )


def _tpu(name: str, bf16: float, int8: float, gib: float, gigabytes: float, both: float) -> Row:
    """A chip of Google Cloud's documentation. gib: HBM; both: GB/s of its links, both ways."""
    torus, watts = {"v5e": (2, None), "v6e": (2, None), "v4": (3, 192.0)}.get(name, (3, None))
    return Row(
        {"bf16": Span(bf16), "int8": Span(int8)},
        Span(round(gib * MEBI * 1024 / GIGA, 3)),
        Span(gigabytes / 1000),
        ("ici", Span(both / 2, note="all directions of its torus together")),
        Span(6.25 if torus == 3 else 3.125, note=RECALLED),
        domain=0,
        torus=torus,
        watts=watts,
        kind="systolic",
        array=256 if name == "v6e" else 128,
        source=f"Google Cloud documentation, docs.cloud.google.com/tpu/docs/{name}",
        date="2026-11-26",
    )


def _volta(memory: float) -> Row:
    # NVIDIA Tesla V100 data sheet, 2018; tensor cores take no float32.
    peak = {"fp16": Span(125), "fp32": Span(15.7, note="NVIDIA Tesla V100 data sheet, 2018")}
    nodes = Span(1.6, 6, "1 to 4 links of 100 Gb/s for 8 devices")
    fabric = ("nvlink", Span(150))
    return Row(peak, Span(memory), Span(0.90), fabric, nodes, note="no bf16", watts=300)


def _grace(fp4: float, memory: float, visible: int | None) -> Row:
    """A Blackwell device of a 72-device domain."""
    peak = {"bf16": Span(2500), "fp8": Span(5000), "fp4": Span(fp4)}
    fabric = ("nvlink", Span(900, note="in a domain of 72 devices"))
    memory_of = (Span(memory), Span(8.0))
    return Row(peak, *memory_of, fabric, Span(50, 100), visible, domain=72, watts=1200)


ROWS = {
    "V100-SXM2-16": _volta(16),
    "V100-SXM2-32": _volta(32),
    "A100-SXM-40": _ampere(40, 1.555, 40_336),
    "A100-SXM-80": _ampere(80, 2.039, 81_050),
    "A800-SXM-80": _ampere(80, 2.039, 81_050, 200, "links of 400 GB/s both ways, else an A100"),
    "A100-PCIe-80": Row(
        {"bf16": Span(312)},
        Span(80),
        Span(1.935),
        ("pcie4", Span(32, 300, "300 with a bridge between a pair, else PCIe 4")),
        Span(12.5, 25),
        watts=300,
    ),
    "H100-SXM": _hopper(80, 3.35),
    "H100-SXM-96": _hopper(96, 2.4, "at most, at 500 W"),
    "H100-PCIe": Row(
        {"bf16": Span(756), "fp8": Span(1513)},
        Span(80),
        Span(2.0),
        ("pcie5", Span(64)),
        Span(25, 50),
        watts=350,
    ),
    "H200": _hopper(141, 4.8),
    "B200-SXM": Row(
        {"bf16": Span(2250), "fp8": Span(4500), "fp4": Span(9000)},
        Span(180, 192),
        Span(7.7, 8.0),
        ("nvlink", Span(900)),
        Span(50, 100),
        watts=1000,
    ),
    "B300-SXM": Row(
        {"bf16": Span(2250), "fp8": Span(4500), "fp4": Span(13500, note=RECALLED)},
        Span(288),
        Span(7.75, 8.0),
        ("nvlink", Span(900)),
        Span(100),
        visible=275_040,
        watts=1400,
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
        domain=4,
        watts=560,
    ),
    "MI250X-GCD": Row(
        {"bf16": Span(191.5)},
        Span(64),
        Span(1.6),
        ("fabric", Span(50, 200, "200 to the other chip of the board, others 50 to 100")),
        Span(12.5, note=f"4 x 25 GB/s for a node of 8 chips, {RECALLED}"),
        note="one of the two chips of a board",
        watts=280,
    ),
    "MI300X": Row(
        {"bf16": Span(1307), "fp8": Span(2614)},
        Span(192),
        Span(5.3),
        ("fabric", Span(448, note="7 links of 64")),
        Span(50),
        watts=750,
    ),
    "RTX-4090": Row(
        {"bf16": Span(165), "fp8": Span(330), "fp16-acc16": Span(330)},
        Span(24),
        Span(1.008),
        ("pcie4", Span(32, note="x16, no peer to peer")),
        Span(1, 12, RECALLED),
        watts=450,
    ),
    "L40S": Row(
        {"bf16": Span(362), "fp8": Span(733)},
        Span(48),
        Span(0.864),
        ("pcie4", Span(32)),
        Span(25),
        watts=350,
    ),
    "T4": Row(
        {"fp16": Span(65)},
        Span(16),
        Span(0.32),
        ("pcie3", Span(16)),
        Span(1, 12, RECALLED),
        note="no bf16",
        watts=70,
        source="NVIDIA T4 data sheet, 2019",
        date="2019-03-01",
    ),
    "GDDR6-PIM": Row(
        {"bf16": Span(4.096, note="8 channels x 16 banks x 16 multipliers at 1 GHz")},
        Span(4.295, note=f"8 channels of 4 Gb, {RECALLED}"),
        Span(0.256, note="of the pins: 8 channels of 16 at 16 Gb/s"),
        ("pcie4", Span(32, note=RECALLED)),
        Span(1, 12, RECALLED),
        note="multiplies in its banks; row timing as Wu et al. have it, recalled, not checked",
        kind="pim",
        banks=Banks(count=128, width=32, cycle=1e-9, row=2048, opening=24e-9),
        source='Lee et al., GDDR6-based Accelerator-in-Memory, 2022; Wu et al., "PIM-GPT", 2024',
        date="2026-11-26",
    ),
    "TPU-v4": _tpu("v4", 275, 275, 32, 1200, 600),
    "TPU-v5e": _tpu("v5e", 197, 393, 16, 819, 400),
    "TPU-v5p": _tpu("v5p", 459, 918, 95, 2765, 1200),
    "TPU-v6e": _tpu("v6e", 918, 1836, 32, 1640, 800),
    "Ascend-910": Row(
        {"fp16": Span(256), "int8": Span(512)},
        Span(32),
        Span(1.2, note=RECALLED),
        ("hccs", Span(30, note="240 Gb/s a port, three of them")),
        Span(12.5, note="RoCE, 100 Gb/s"),
        watts=310,
        kind="systolic",
        array=16,
        source="Huawei, Ascend 910 at Hot Chips 31, 2019",
        date="2019-08-19",
    ),
}

# Multiprocessors, or compute units, of the data sheets and of the makers' architecture papers.
CORES = {
    "V100-SXM2-16": 80, "V100-SXM2-32": 80, "A100-SXM-40": 108, "A100-SXM-80": 108,
    "A800-SXM-80": 108, "A100-PCIe-80": 108, "H100-SXM": 132, "H100-SXM-96": 132,
    "H100-PCIe": 114, "H200": 132, "B200-SXM": 148, "B300-SXM": 148, "GB200": 148, "GB300": 148,
    "MI250X": 220, "MI250X-GCD": 110, "MI300X": 304, "RTX-4090": 128, "L40S": 142,
    "T4": 40,
}  # fmt: skip
