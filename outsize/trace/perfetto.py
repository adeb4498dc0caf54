"""Traces as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

A process is a worker of one source (predicted or measured), a thread is a lane, an action is a
complete event, what is sent is an arrow to its receiving, and the live bytes of each tier are
counter tracks. A measured action beside a predicted trace says how long that one took. Format:
"Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.texts import write_text
from outsize.trace.match import differences, messages
from outsize.trace.trace import Event, Trace

Row = dict[str, Any]  # one trace event, ready for JSON
Which = tuple[int, int]  # a trace, and the identity of an event of it
NANO = 1e9


@dataclass(frozen=True)
class _Process:
    """One worker of one trace, in the order of the viewer."""

    pid: int
    name: str
    events: tuple[Event, ...]
    origin: float  # seconds: the start of its trace, which becomes 0
    trace: int  # which of those that are written


def trace_events(traces: Sequence[Trace]) -> dict[str, Any]:
    """The JSON object of one or several traces, each starting at 0, workers side by side.

    Times are microseconds with three decimals (nanoseconds, the viewer's own resolution).
    """
    processes = _processes(traces)
    metadata = [row for process in processes for row in _process_rows(process)]
    told = _told(traces)
    timed: list[Row] = []
    places: dict[Which, Row] = {}
    for process in processes:
        slices = _lane_rows(process, told)
        places |= slices
        timed += [*slices.values(), *_counter_rows(process)]
    timed += _arrows(traces, places)
    timed.sort(key=lambda row: (row["ts"], row["pid"], "XsfC".index(row["ph"])))
    other = {
        f"{trace.source}{_suffix(traces, i)}.{key}": value
        for i, trace in enumerate(traces)
        for key, value in sorted(trace.meta.items())
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": metadata + timed}


def write_perfetto(path: str | Path, *traces: Trace) -> Path:
    """Write traces as one file for Perfetto. Raises OutsizeError when it cannot be written."""
    return write_text(json.dumps(trace_events(traces), allow_nan=False) + "\n", path)


def _suffix(traces: Sequence[Trace], index: int) -> str:
    """Tells traces of one source apart: "", then " 2", " 3"."""
    before = sum(t.source == traces[index].source for t in traces[:index])
    return f" {before + 1}" if before else ""


def _processes(traces: Sequence[Trace]) -> list[_Process]:
    """Worker by worker, so that the predicted and the measured one are neighbours."""
    found: list[_Process] = []
    for worker in sorted({e.worker for t in traces for e in t.events}):
        for i, trace in enumerate(traces):
            events = tuple(e for e in trace.events if e.worker == worker)
            if events:
                name = f"worker {worker} ({trace.source}{_suffix(traces, i)})"
                origin = min(e.start for e in trace.events)
                found.append(_Process(len(found) + 1, name, events, origin, i))
    return found


def _slots(events: Iterable[Event]) -> dict[tuple[str, int], list[Event]]:
    """Events by (lane, slot). A viewer nests overlapping events of one thread and drops those
    that do not nest, so an event that overlaps another of its lane gets a further slot."""
    slots: dict[tuple[str, int], list[Event]] = {}
    ends: dict[tuple[str, int], int] = {}
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        slot = 0
        while ends.get((event.lane, slot), -(2**63)) > round(event.start * NANO):
            slot += 1
        slots.setdefault((event.lane, slot), []).append(event)
        ends[event.lane, slot] = round(event.end * NANO)
    return slots


def _process_rows(process: _Process) -> list[Row]:
    def row(name: str, tid: int, args: dict[str, Any]) -> Row:
        return {"ph": "M", "name": name, "pid": process.pid, "tid": tid, "args": args}

    rows = [
        row("process_name", 0, {"name": process.name}),
        row("process_sort_index", 0, {"sort_index": process.pid}),
    ]
    for tid, (lane, slot) in enumerate(sorted(_slots(process.events)), 1):
        name = lane if slot == 0 else f"{lane} +{slot}"
        rows.append(row("thread_name", tid, {"name": name}))
        rows.append(row("thread_sort_index", tid, {"sort_index": tid}))
    return rows


def _micro(process: _Process, seconds: float) -> float:
    """Microseconds since the trace's origin, on the nanosecond grid so that neighbours touch."""
    return (round(seconds * NANO) - round(process.origin * NANO)) / 1000


def _lane_rows(process: _Process, told: Mapping[Which, Row]) -> dict[Which, Row]:
    """By event, its row."""
    rows: dict[Which, Row] = {}
    for tid, (_, events) in enumerate(sorted(_slots(process.events).items()), 1):
        for event in events:
            start = _micro(process, event.start)
            args = {"stage": event.stage, "microbatch": event.microbatch, "peak_bytes": event.peak}
            args |= {f"{key} (bytes)": count for key, count in sorted(event.live.items())}
            which = (process.trace, id(event))
            rows[which] = {
                "ph": "X",
                "name": event.name,
                "cat": event.kind,
                "ts": start,
                "dur": round(_micro(process, event.end) - start, 3),
                "pid": process.pid,
                "tid": tid,
                "args": args | told.get(which, {}),
            }
    return rows


def _told(traces: Sequence[Trace]) -> dict[Which, Row]:
    """By measured event, what was predicted of it, where there is one trace of each source."""
    if [trace.source for trace in traces] != ["predicted", "measured"]:
        return {}
    return {
        (1, id(one.measured)): {
            "predicted (ms)": round(one.expected * 1e3, 6),
            "waited for others (ms)": round(one.waited * 1e3, 6),
            "beyond forecast (ms)": round(one.beyond * 1e3, 6),
        }
        for one in differences(traces[0], traces[1])
    }


def _arrows(traces: Sequence[Trace], places: Mapping[Which, Row]) -> list[Row]:
    """From the start of what sends to the middle of when it is received: a viewer binds the ends of
    an arrow to the actions that these moments lie in."""
    rows: list[Row] = []
    for number, trace in enumerate(traces):
        for send, receive in messages(trace):
            one, other = (places[number, id(trace.events[place])] for place in (send, receive))
            since, until = max(one["ts"], other["ts"]), other["ts"] + other["dur"]
            middle = round((min(since, until) + until) / 2, 3)
            for phase, at, ts in (("s", one, one["ts"]), ("f", other, middle)):
                where = {"ts": ts, "pid": at["pid"], "tid": at["tid"], "args": {}}
                name = {"ph": phase, "id": len(rows) // 2, "name": "message", "cat": "message"}
                rows.append(name | where | ({"bp": "e"} if phase == "f" else {}))
    return rows


def _counter_rows(process: _Process) -> list[Row]:
    """One counter a tier with a series a kind, set when an action ends; one for the peak.

    An event without live bytes says nothing; in any other a kind that is missing is 0.
    """
    keys = sorted({key for event in process.events for key in event.live})
    tiers: dict[str, list[str]] = {}
    for key in keys:
        tier, _, kind = key.partition("/")
        tiers.setdefault(tier, []).append(kind)
    rows: list[Row] = []
    for event in process.events:
        end = _micro(process, event.end)
        for tier, kinds in tiers.items() if event.live else ():
            series = {kind: event.live.get(f"{tier}/{kind}", 0) for kind in kinds}
            rows.append(_counter(process, f"{tier} bytes", end, series))
        if event.peak:
            start = _micro(process, event.start)
            rows.append(_counter(process, "device peak", start, {"bytes": event.peak}))
    return rows


def _counter(process: _Process, name: str, micro: float, series: dict[str, int]) -> Row:
    return {"ph": "C", "name": name, "ts": micro, "pid": process.pid, "tid": 0, "args": series}
