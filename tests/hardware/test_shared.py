"""A processor that several workers share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rates import known_hardware

from outsize.hardware.host import cores
from outsize.hardware.probe import probe
from outsize.hardware.shared import shared


def test_workers_share_what_the_machine_has():
    whole = probe("cpu")
    count = 4 * cores()
    mine, before = shared(whole, count).devices[0], whole.devices[0]
    assert mine.bandwidth.value * count == pytest.approx(before.bandwidth.value)
    assert mine.memory_bytes == before.memory_bytes // count
    assert shared(whole, count).tier("device").bytes == whole.tier("device").bytes // count
    assert mine.measured.overhead is not None and before.measured.overhead is not None
    assert mine.measured.overhead.value == pytest.approx(4 * before.measured.overhead.value)
    for here, there in zip(mine.measured.matmul, before.measured.matmul, strict=True):
        assert here.rate.value * count == pytest.approx(there.rate.value)


@pytest.mark.parametrize(
    ("threads", "granted", "workers", "rate", "longer"),
    [
        (2, 0.0, 2, 1 / 2, 1.0),
        (1, 0.0, 2, 1.0, 1.0),
        (1, 1.5, 2, 0.75, 4 / 3),
        (2, 1.5, 2, 1 / 2, 4 / 3),
        (2, 0.5, 2, 1 / 2, 2.0),
    ],
)
def test_workers_share_the_time_that_a_quota_leaves(
    threads: int, granted: float, workers: int, rate: float, longer: float
) -> None:
    """What so many threads of two cores measured, under a quota: time is shared, and a worker has
    no more than the threads measured."""
    (device,) = known_hardware().devices
    one = replace(device, cores=2, threads=threads, granted=granted)
    mine = shared(replace(known_hardware(), devices=(one,)), workers).devices[0]
    assert mine.bandwidth.value == pytest.approx(rate * device.bandwidth.value)
    assert mine.measured.overhead is not None and device.measured.overhead is not None
    assert mine.measured.overhead.value == pytest.approx(longer * device.measured.overhead.value)


def test_one_worker_has_all_of_it():
    whole = probe("cpu")
    assert shared(whole, 1) is whole
