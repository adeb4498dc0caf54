"""The catalogue against figures copied once more, by hand, from the project's hardware table."""

from __future__ import annotations

import pytest

from outsize.errors import OutsizeError
from outsize.hardware import catalogue, names
from outsize.simulate.counter import Work
from outsize.simulate.forecast import duration

# name: bf16 (fp16 for V100) TF, fp8 TF, GB, TB/s, fabric GB/s, nodes GB/s (lower ends)
TABLE = {
    "V100-SXM2-16": (125, None, 16, 0.90, 150, 1.6),
    "V100-SXM2-32": (125, None, 32, 0.90, 150, 1.6),
    "A100-SXM-40": (312, None, 40, 1.555, 300, 25),
    "A100-SXM-80": (312, None, 80, 2.039, 300, 25),
    "A100-PCIe-80": (312, None, 80, 1.935, 32, 12.5),
    "H100-SXM": (989, 1979, 80, 3.35, 450, 50),
    "H100-SXM-96": (989, 1979, 96, 2.4, 450, 50),
    "H100-PCIe": (756, 1513, 80, 2.0, 64, 25),
    "H200": (989, 1979, 141, 4.8, 450, 50),
    "B200-SXM": (2250, 4500, 180, 7.7, 900, 50),
    "B300-SXM": (2250, 4500, 288, 7.75, 900, 100),
    "GB200": (2500, 5000, 185, 8.0, 900, 50),
    "GB300": (2500, 5000, 277, 8.0, 900, 50),
    "MI250X": (383, None, 128, 3.2, 50, 25),
    "MI250X-GCD": (191.5, None, 64, 1.6, 50, 12.5),
    "MI300X": (1307, 2614, 192, 5.3, 7 * 64, 50),
    "RTX-4090": (165, 330, 24, 1.008, 32, 1),
    "L40S": (362, 733, 48, 0.864, 32, 25),
    "A800-SXM-80": (312, None, 80, 2.039, 200, 25),
    "TPU-v4": (275, None, 34.36, 1.2, 300, 6.25),
    "TPU-v5e": (197, None, 17.18, 0.819, 200, 3.125),
    "TPU-v5p": (459, None, 102.005, 2.765, 600, 6.25),
    "TPU-v6e": (918, None, 34.36, 1.64, 400, 3.125),
    "T4": (65, None, 16, 0.32, 16, 1),
    "GDDR6-PIM": (4.096, None, 4.295, 0.256, 32, 1),
    "Ascend-910": (256, None, 32, 1.2, 30, 12.5),
}


@pytest.mark.parametrize("name", TABLE)
def test_row(name: str) -> None:
    half, fp8, memory, bandwidth, fabric, nodes = TABLE[name]
    hardware = catalogue(name, count=8)
    (device,) = hardware.devices
    assert device.count == 8
    half_name = "fp16" if name.startswith(("V100", "Ascend", "T4")) else "bf16"
    assert device.peak[half_name].value == pytest.approx(half * 1e12)
    assert ("fp8" in device.peak) == (fp8 is not None)
    if fp8 is not None:
        assert device.peak["fp8"].value == pytest.approx(fp8 * 1e12)
    assert device.memory.value == pytest.approx(memory * 1e9)
    assert device.bandwidth.value == pytest.approx(bandwidth * 1e12)
    inside, between = hardware.links
    assert (inside.between, between.between) == ("devices", "nodes")
    assert inside.bandwidth.value == pytest.approx(fabric * 1e9)
    assert between.bandwidth.value == pytest.approx(nodes * 1e9)
    rates = [*device.peak.values(), device.bandwidth, inside.bandwidth, between.bandwidth]
    assert all(r.source and r.date for r in rates)
    if device.watts is not None:
        assert device.watts.unit == "W" and 50 < device.watts.value < 2000
    assert (device.kind == "systolic") == (device.array > 0)
    assert (device.kind == "pim") == (device.banks is not None)


@pytest.mark.parametrize("name", ["V100-SXM2-16", "V100-SXM2-32"])
def test_float32_of_a_v100_is_that_of_its_sheet(name: str) -> None:
    """Not of its tensor cores, which take 16 bits. Bits that its sheet lacks are of those."""
    (device,) = catalogue(name, count=8).devices
    work = Work(products={(8192, 8192, 8192, "float32"): 1})
    assert duration(work, device) == pytest.approx(2 * 8192**3 / 15.7e12)
    work = Work(products={(8192, 8192, 8192, "bfloat16"): 1})
    assert duration(work, device) == pytest.approx(2 * 8192**3 / 62.5e12)


def test_table_is_complete() -> None:
    assert set(names()) == set(TABLE)


def test_visible_bytes_and_ranges() -> None:
    assert catalogue("B300-SXM").devices[0].memory_bytes == 275_040 * 2**20
    assert catalogue("GB200").tier("device").bytes == 189_471 * 2**20
    b200 = catalogue("b200-sxm").devices[0]
    assert (b200.memory_bytes, b200.memory.upto) == (180_000_000_000, 192e9)
    assert b200.peak["fp4"].value == 9e15


def test_what_was_recalled_says_so() -> None:
    notes = [
        catalogue("B300-SXM").devices[0].peak["fp4"].note,
        *(catalogue(n).links[1].bandwidth.note for n in ("RTX-4090", "MI250X", "MI250X-GCD")),
    ]
    assert all("recalled, not checked" in note for note in notes)
    assert catalogue("B200-SXM").devices[0].peak["fp4"].note == ""


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(OutsizeError, match="did you mean 'H100-SXM'"):
        catalogue("h100-sxn")
    with pytest.raises(OutsizeError, match=r"not in the catalogue; known: .*H200"):
        catalogue("abacus")
    with pytest.raises(OutsizeError, match="count 0"):
        catalogue("H200", 0)
