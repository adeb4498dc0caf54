"""Totals, busy share and units against figures worked out by hand."""

from __future__ import annotations

import pytest

from outsize.report import KindTotal, binary_bytes, busy, seconds, totals
from outsize.report.units import signed_percent
from outsize.trace import Event, Trace


def event(worker: int, lane: str, kind: str, start: float, end: float) -> Event:
    return Event(worker, lane, kind, 0, 0, start, end)


TRACE = Trace(
    "measured",
    (
        event(0, "compute", "FORWARD", 0.0, 1.0),
        event(0, "compute", "BACKWARD", 1.0, 4.0),
        event(1, "compute", "FORWARD", 2.0, 3.0),
        event(1, "compute", "FORWARD", 2.5, 4.5),  # overlaps: counted once in busy
        event(0, "network", "SEND", 4.0, 5.0),
    ),
)


def test_totals_by_kind() -> None:
    assert totals(TRACE) == (
        KindTotal("FORWARD", 3, 4.0, 0.5),
        KindTotal("BACKWARD", 1, 3.0, 0.375),
        KindTotal("SEND", 1, 1.0, 0.125),
    )
    assert totals(TRACE)[0].mean == pytest.approx(4 / 3)
    assert totals(Trace("measured", ())) == ()


def test_busy_is_of_all_workers_and_the_whole_makespan() -> None:
    assert busy(TRACE, "compute") == pytest.approx((4.0 + 2.5) / (2 * 5.0))
    assert busy(TRACE, "network") == pytest.approx(1.0 / (2 * 5.0))
    assert busy(Trace("measured", ()), "compute") == 0.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (0.9996, "1.00 s"),
        (12345.6, "12,346 s"),
        (0.0123, "12.3 ms"),
        (0.000456, "456 µs"),
        (9.996, "10.0 s"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_binary_bytes(value: int, text: str) -> None:
    assert binary_bytes(value) == text


def test_signed_percent() -> None:
    assert signed_percent(1.042, 1.0) == "+4.2%"
    assert signed_percent(0.5, 1.0) == "\N{MINUS SIGN}50.0%"
    assert signed_percent(1.0, 0.0) == "–"
