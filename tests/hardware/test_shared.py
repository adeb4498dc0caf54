"""A processor that several workers share."""

from __future__ import annotations

import pytest

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


def test_one_worker_has_all_of_it():
    whole = probe("cpu")
    assert shared(whole, 1) is whole
