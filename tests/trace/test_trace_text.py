"""trace.json: exact round trip, and a clear line for every way it can be damaged."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from outsize.errors import OutsizeError
from outsize.trace import Event, Trace, dumps, loads, read, write


def example(seed: int = 0, count: int = 40) -> Trace:
    draw = random.Random(seed)
    events, now = [], 0.0
    for i in range(count):
        end = now + draw.random() / 3
        live = {"device/activations": draw.randrange(2**40), "host/optimizer": i} if i % 4 else {}
        events.append(Event(i % 3, "compute", "FORWARD", i % 5 - 1, i - 1, now, end, live, i * 7))
        now = end
    return Trace("measured", tuple(events), {"model": "größe <b>", "a": "1"})


def test_round_trip_is_exact_and_stable(tmp_path: Path) -> None:
    trace = example()
    path = write(trace, tmp_path / "trace.json")
    assert read(path) == trace
    assert dumps(read(path)) == path.read_text(encoding="utf-8")
    assert len(path.read_text().splitlines()) == len(trace.events) + 2
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_empty_trace_round_trips() -> None:
    trace = Trace("predicted", ())
    assert loads(dumps(trace)) == trace


def damaged(field: str, value: Any) -> str:
    data = json.loads(dumps(example(count=3)))
    data["events"][2][field] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("worker", -1, "event 2: worker -1"),
        ("worker", True, "event 2: worker True"),
        ("worker", "0", "event 2: worker '0'"),
        ("lane", "", "event 2: lane ''"),
        ("kind", None, "event 2: kind None"),
        ("stage", -2, "event 2: stage -2"),
        ("microbatch", 1.5, "event 2: microbatch 1.5"),
        ("start", "now", "event 2: start 'now'"),
        ("start", 99.0, "lies before start"),
        ("end", float("nan"), "NaN"),
        ("live", [1], "event 2: live"),
        ("live", {"activations": 1}, "'activations'"),
        ("live", {"device/activations": -4}, "device/activations': -4"),
        ("peak", 2.5, "event 2: peak 2.5"),
    ],
)
def test_damage_names_event_and_field(field: str, value: Any, says: str) -> None:
    with pytest.raises(OutsizeError) as error:
        loads(damaged(field, value), "t.json")
    assert says in str(error.value)
    assert str(error.value).startswith("t.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a JSON trace"),
        ("[" * 100_000, "not a JSON trace"),
        ("[]", "outsize-trace"),
        ('{"format": "outsize-trace", "version": 9}', "version 9, expected 1"),
        ('{"format": "outsize-trace", "version": 1, "meta": {"a": 1}}', "meta"),
        ('{"format": "outsize-trace", "version": 1, "events": {}}', "events must be a list"),
        (
            '{"format": "outsize-trace", "version": 1, "source": "guessed", "events": []}',
            "'guessed'",
        ),
        ('{"format": "outsize-trace", "version": 1, "source": "measured", "events": [1]}', "0: 1"),
    ],
)
def test_damaged_file_is_refused(text: str, says: str) -> None:
    with pytest.raises(OutsizeError) as error:
        loads(text)
    assert says in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match=r"none\.json cannot be read: No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OutsizeError, match="binary cannot be read: not text"):
        read(tmp_path / "binary")


def test_refuses_times_that_are_not_finite() -> None:
    event = Event(0, "compute", "FORWARD", 0, 0, 0.0, float("inf"))
    with pytest.raises(OutsizeError, match="not finite"):
        dumps(Trace("measured", (event,)))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(example(), tmp_path / "trace.json")
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutsizeError, match="No space left"):
        write(example(1), path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_unwritable_place_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match="cannot write"):
        write(example(), tmp_path / "no" / "trace.json")
