"""Memory that multiplies where it lies, against banks that are played cycle by cycle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outsize.errors import OutsizeError
from outsize.foresight.shape import Shape
from outsize.foresight.sources import source_of
from outsize.hardware import catalogue, parse_spec
from outsize.hardware.form import dumps, loads
from outsize.hardware.hardware import Banks
from outsize.serve.described import Served

SMALL = Banks(count=4, width=8, cycle=1.0, row=32, opening=5.0)  # seconds, for whole numbers


def played(m: int, n: int, k: int, of: Banks) -> float:
    """Seconds until the last bank has multiplied all of its bf16 columns, one cycle after another:
    its next bytes lie in the row that is open, or that is opened."""
    ends = []
    for bank in range(of.count):
        left, clock, inside = len(range(bank, n, of.count)) * k * 2, 0.0, 0
        while left > 0:
            if inside == 0:
                clock, inside = clock + of.opening, of.row
            clock, inside, left = clock + of.cycle, inside - of.width, left - of.width
        ends.append(clock)
    return m * max(ends)


@pytest.mark.parametrize("size", [(1, 4, 16), (1, 10, 16), (3, 7, 12), (2, 33, 40)])
def test_products_take_what_the_fullest_bank_does(size: tuple[int, int, int]) -> None:
    """The vectors pass the pins beside that."""
    made = catalogue("GDDR6-PIM").devices[0]
    device = replace(made, banks=SMALL, bandwidth=replace(made.bandwidth, value=2.0))
    m, n, k = size
    pins = m * (k + n) * 2 / 2.0
    assert source_of(device).product(*size, "bf16").seconds == pytest.approx(
        played(*size, SMALL) + pins
    )
    with pytest.raises(OutsizeError, match="no rate in fp8; it has bf16"):
        source_of(device).product(*size, "fp8")


def test_banks_read_faster_than_pins_and_keep_their_rate_in_files() -> None:
    """128 banks of 32 bytes a nanosecond, 24 ns for each row of 64 cycles."""
    hardware = catalogue("GDDR6-PIM")
    (device,) = hardware.devices
    assert device.banks is not None
    assert device.banks.inside == pytest.approx(128 * 32e9 * 64 / 88)
    assert loads(dumps(hardware)) == hardware
    with pytest.raises(OutsizeError, match="width"):
        replace(device.banks, width=0)


def test_a_token_takes_the_weights_through_the_banks_once() -> None:
    shape = Shape(12, 768, 12, 50257, positions=1024)
    price = Served(shape, parse_spec("GDDR6-PIM").groups[0], 1, "bf16", 0.0).price()
    (device,) = catalogue("GDDR6-PIM").devices
    assert device.banks is not None
    read = 2 * 12 * 12 * 768**2 / device.banks.inside
    assert read < price.blocks(1) < 1.5 * read
    assert price.blocks(4) == pytest.approx(4 * price.blocks(1)), "nothing is used twice"
