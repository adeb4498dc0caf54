"""The Perfetto export against the rules of the documented trace event format."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from outsize.trace import Event, Trace, trace_events, write_perfetto


def pipeline(source: Any, slow: float, origin: float = 0.0) -> Trace:
    """Two workers, two lanes, unordered thirds of seconds, so that rounding is exercised."""
    events = []
    for worker in range(2):
        now = origin
        for m in range(30):
            end = now + slow / 3
            live = {"device/activations": 1000 * m, "device/parameters": 5, "host/data": m}
            if m % 7 == 3:
                live = {}
            if m % 5 == 0:
                live = {"device/parameters": 5}
            events.append(Event(worker, "compute", "FORWARD", worker, m, now, end, live, 2000 * m))
            events.append(Event(worker, "network", "SEND", worker, m, end, end + slow / 9))
            now = end
    return Trace(source, tuple(events), {"model": "</script><b>"})


def check_format(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Asserts what the format document asks of each phase used; gives the events back."""
    assert data["displayTimeUnit"] in ("ms", "ns")
    rows = data["traceEvents"]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    last = -math.inf
    for row in rows:
        assert type(row["pid"]) is int
        assert type(row["tid"]) is int
        assert isinstance(row["name"], str)
        assert isinstance(row["args"], dict)
        if row["ph"] == "M":
            assert last == -math.inf, "metadata first"
            wanted = {"process_name": "name", "process_sort_index": "sort_index"}
            wanted |= {"thread_name": "name", "thread_sort_index": "sort_index"}
            assert list(row["args"]) == [wanted[row["name"]]]
            assert "ts" not in row
            continue
        assert row["ph"] in ("X", "C", "s", "f")
        assert row["ts"] >= 0
        assert row["ts"] >= last, "monotonic"
        last = row["ts"]
        if row["ph"] == "X":
            assert row["dur"] >= 0
            assert isinstance(row["cat"], str)
        elif row["ph"] in ("s", "f"):
            assert type(row["id"]) is int and isinstance(row["cat"], str)
            assert (row["ph"] == "f") == (row.get("bp") == "e"), "to the action it lies in"
        else:
            assert row["args"], "a counter has a series"
            assert all(type(v) in (int, float) for v in row["args"].values())
    named = {(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"}
    assert {(r["pid"], r["tid"]) for r in rows if r["ph"] == "X"} == named
    assert {r["pid"] for r in rows} == {r["pid"] for r in rows if r["name"] == "process_name"}
    return list(rows)


def threads(rows: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(start, end) in whole nanoseconds by thread."""
    spans = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            start = round(row["ts"] * 1000)
            spans[row["pid"], row["tid"]].append((start, start + round(row["dur"] * 1000)))
    return spans


def test_two_traces_keep_the_format_and_lie_side_by_side(tmp_path: Path) -> None:
    path = write_perfetto(
        tmp_path / "p.json", pipeline("predicted", 0.01), pipeline("measured", 0.011, 5.0)
    )
    rows = check_format(json.loads(path.read_text()))
    names = {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}
    assert list(names.values()) == [
        "worker 0 (predicted)",
        "worker 0 (measured)",
        "worker 1 (predicted)",
        "worker 1 (measured)",
    ]
    firsts = {
        pid: min(r["ts"] for r in rows if r["ph"] == "X" and r["pid"] == pid) for pid in names
    }
    assert set(firsts.values()) == {0}, "each trace starts at 0"
    assert sum(r["ph"] == "X" for r in rows) == 240
    first = next(r for r in rows if r["ph"] == "X")
    assert first["name"] == "FORWARD s0 m0"
    assert math.isclose(first["dur"], 1e4 / 3, abs_tol=1e-3), "microseconds"
    assert first["args"]["stage"] == 0


def test_events_of_a_thread_touch_but_never_overlap() -> None:
    rows = check_format(trace_events([pipeline("measured", 1.0)]))
    for spans in threads(rows).values():
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end
    compute = threads(rows)[1, 1]
    assert all(start == end for (_, end), (start, _) in pairwise(compute)), "no rounding gaps"


def test_overlapping_actions_of_a_lane_get_their_own_thread() -> None:
    events = tuple(Event(0, "copy", "FETCH", i, -1, i * 0.5, i * 0.5 + 1.2) for i in range(6))
    rows = check_format(trace_events([Trace("measured", events)]))
    names = [r["args"]["name"] for r in rows if r["name"] == "thread_name"]
    assert names == ["copy", "copy +1", "copy +2"]
    assert sum(len(s) for s in threads(rows).values()) == 6
    for spans in threads(rows).values():
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end


def test_counters_follow_live_bytes() -> None:
    live = [{"device/activations": 5, "device/parameters": 7}, {}, {"device/parameters": 7}]
    events = tuple(
        Event(0, "compute", "FORWARD", 0, i, float(i), i + 1.0, held, 20 if i == 1 else 0)
        for i, held in enumerate(live)
    )
    rows = check_format(trace_events([Trace("measured", events)]))
    device = [(r["ts"], r["args"]) for r in rows if r["name"] == "device bytes"]
    assert device == [
        (1e6, {"activations": 5, "parameters": 7}),
        (3e6, {"activations": 0, "parameters": 7}),  # gone, so 0; the silent event says nothing
    ]
    assert [(r["ts"], r["args"]) for r in rows if r["name"] == "device peak"] == [
        (1e6, {"bytes": 20})
    ]


def test_arrows_lead_from_what_sends_to_what_receives() -> None:
    events = (
        Event(0, "send", "SEND.activations", 1, 0, 2.0, 2.5),
        Event(0, "send", "SEND.activations", 1, 1, 4.0, 4.25),
        Event(1, "receive", "RECV.activations", 1, 0, 0.5, 2.5),  # waits
        Event(1, "receive", "RECV.activations", 1, 1, 4.125, 4.375),
        Event(1, "receive", "RECV.gradients", 1, 1, 5.0, 6.0),  # of nobody
    )
    rows = check_format(trace_events([Trace("predicted", events), Trace("measured", events)]))
    arrows = [row for row in rows if row["ph"] in "sf"]
    assert len(arrows) == 8 and len({row["id"] for row in arrows}) == 4
    for start in (row for row in arrows if row["ph"] == "s"):
        (finish,) = (row for row in arrows if row["ph"] == "f" and row["id"] == start["id"])
        inside = []
        for end in (start, finish):
            here = [
                r
                for r in rows
                if r["ph"] == "X" and (r["pid"], r["tid"]) == (end["pid"], end["tid"])
            ]
            inside += [r for r in here if r["ts"] <= end["ts"] <= r["ts"] + r["dur"]]
        assert [row["name"].split()[0] for row in inside] == [
            "SEND.activations",
            "RECV.activations",
        ]
        assert inside[0]["args"]["microbatch"] == inside[1]["args"]["microbatch"]
        assert start["ts"] <= finish["ts"]
    both = {row["pid"] for row in arrows}
    assert len(both) == 4, "predicted and measured each have their own"


def test_a_measured_action_says_what_was_predicted_of_it() -> None:
    predicted, measured = pipeline("predicted", 0.01), pipeline("measured", 0.013, 5.0)
    rows = check_format(trace_events([predicted, measured]))
    names = {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}
    for row in rows:
        if row["ph"] != "X":
            continue
        if "predicted" in names[row["pid"]]:
            assert "beyond forecast (ms)" not in row["args"]
            continue
        told = row["args"]["predicted (ms)"] + row["args"]["beyond forecast (ms)"]
        assert math.isclose(told, row["dur"] / 1e3, abs_tol=2e-6)
        assert math.isclose(row["args"]["predicted (ms)"], row["dur"] / 1.3e3, abs_tol=2e-6)


def test_no_traces_no_events() -> None:
    assert check_format(trace_events([])) == []
    assert check_format(trace_events([Trace("measured", ())])) == []
