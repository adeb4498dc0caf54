"""The timeline page: lanes over time, the memory curve under them, totals by kind of action.

One HTML file that holds everything it needs and opens from disk. Names come from models and from
files, so every text is escaped, the data is JSON that cannot close its element, and the page's
own policy allows no script but this one and no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from outsize.errors import OutsizeError, counted
from outsize.report.tables import beyond_card, kinds_card, meta_card, workers_card
from outsize.report.totals import busy
from outsize.report.units import binary_bytes, seconds, signed_percent
from outsize.texts import write_text
from outsize.trace import Event, Trace, differences, pairs, waiting

KINDS = (  # the order of the legend, whatever state follows a dot; others follow by name
    *("FORWARD", "LOSS", "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "RECOMPUTE", "PREFILL"),
    *("DECODE", "NORM", "UPDATE", "SEND", "RECV", "GATHER", "REDUCE", "COLLECT"),
    *("MERGE", "EXCHANGE", "FETCH", "EVICT", "COPY"),
)
CARDS = (beyond_card, kinds_card, workers_card, meta_card)  # from the top
SCRIPTS = ("model", "lanes", "memory", "hand")  # one scope, in this order
LANES = (  # from the top; others follow by name
    *("compute", "compute beside", "exchange", "network", "merge", "send", "receive", "fetch"),
    *("evict", "copy", "host", "disk"),
)


def timeline(*traces: Trace, budget: int | None = None, title: str = "Timeline") -> str:
    """The page of one trace, or of a predicted and a measured one over each other.

    budget: bytes of the device tier, drawn as a line. Raises OutsizeError for other numbers of
    traces, or two of one source.
    """
    sources = [trace.source for trace in traces]
    if not 1 <= len(traces) <= 2 or len(set(sources)) != len(sources):
        given = ", ".join(sources) or "none"
        raise OutsizeError(
            f"timeline of traces: {given}; expected one trace, or one predicted and one measured"
        )
    ordered = [  # predicted first; events of each as the script has them
        replace(trace, events=tuple(sorted(trace.events, key=lambda e: (e.start, e.end))))
        for trace in sorted(traces, key=lambda trace: trace.source == "measured")
    ]
    page = files("outsize.report") / "page"
    parts = [(page / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = "\n".join(('"use strict";', "(() => {", *parts, "})();", ""))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((page / "timeline.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        subtitle=html.escape(_subtitle(ordered)),
        policy=f"sha256-{digest}",
        style=(page / "timeline.css").read_text(encoding="utf-8"),
        tiles=_tiles(ordered, budget),
        tables="".join(card(ordered) for card in CARDS),
        data=_script_json(_data(ordered, budget)),
        script=script,
    )


def write_timeline(
    path: str | Path, *traces: Trace, budget: int | None = None, title: str = "Timeline"
) -> Path:
    """Write the page in one step. Raises OutsizeError when the file cannot be written."""
    return write_text(timeline(*traces, budget=budget, title=title), path)


def _script_json(data: object) -> str:
    """JSON that an HTML parser takes as plain text: without <, > and &."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(traces: Sequence[Trace], budget: int | None) -> dict[str, Any]:
    """What the script draws, in columns: one entry an event."""
    events = [event for trace in traces for event in trace.events]
    kinds = sorted({event.kind for event in events}, key=lambda kind: _rank(kind, KINDS))
    keys = sorted({key for event in events for key in event.live})
    lanes = sorted(
        {(event.worker, event.lane) for event in events},
        key=lambda wl: (wl[0], _rank(wl[1], LANES)),
    )
    return {
        "kinds": kinds,
        "keys": keys,
        "lanes": lanes,
        "budget": budget,
        "traces": [
            _columns(trace, kinds, keys, lanes) | matches
            for trace, matches in zip(traces, _matches(traces), strict=True)
        ],
    }


def _matches(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """By trace: each event's twin in the other one (-1: none), and of the measured one the seconds
    beyond forecast (null where there is none)."""
    if len(traces) == 1:
        return [{"twin": [-1] * len(traces[0].events)}]
    predicted, measured = traces
    twins: list[list[int]] = [[-1] * len(trace.events) for trace in traces]
    for i, j in pairs(predicted, measured):
        twins[0][i], twins[1][j] = j, i
    idle = waiting(predicted), waiting(measured)
    beyond: list[float | None] = [None] * len(measured.events)
    for j, i in enumerate(twins[1]):
        if i >= 0:
            took = _length(measured.events[j]) - idle[1][j]
            beyond[j] = round(took - (_length(predicted.events[i]) - idle[0][i]), 9)
    return [{"twin": twins[0]}, {"twin": twins[1], "beyond": beyond}]


def _length(event: Event) -> float:
    return event.end - event.start


def _rank(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    base = name.partition(".")[0]
    return order.index(base) if base in order else len(order), name


def _columns(
    trace: Trace, kinds: list[str], keys: list[str], lanes: list[tuple[int, str]]
) -> dict[str, Any]:
    """Times in seconds from the trace's own first start; live bytes -1 where an event is silent."""
    origin = min((event.start for event in trace.events), default=0.0)
    events = trace.events
    lane_number = {lane: i for i, lane in enumerate(lanes)}
    kind_number = {kind: i for i, kind in enumerate(kinds)}
    return {
        "source": trace.source,
        "lane": [lane_number[e.worker, e.lane] for e in events],
        "kind": [kind_number[e.kind] for e in events],
        "stage": [e.stage for e in events],
        "microbatch": [e.microbatch for e in events],
        "part": [e.part for e in events],
        "start": [round(e.start - origin, 9) for e in events],
        "end": [round(e.end - origin, 9) for e in events],
        "wait": [round(wait, 9) for wait in waiting(trace)],
        "peak": [e.peak for e in events],
        "live": [[e.live.get(key, 0) if e.live else -1 for e in events] for key in keys],
    }


def _subtitle(traces: Sequence[Trace]) -> str:
    workers = len({event.worker for trace in traces for event in trace.events})
    actions = max(len(trace.events) for trace in traces)
    what = " over ".join(trace.source for trace in traces)
    numbers = f"{counted(workers, 'worker', ',')} · {counted(actions, 'action', ',')}"
    return f"{what.capitalize()} · {numbers}"


def _tiles(traces: Sequence[Trace], budget: int | None) -> str:
    """The few figures that matter, predicted beside measured where there are both."""
    spans = [seconds(trace.span()) for trace in traces]
    tiles = [_tile("Makespan", traces, [trace.span() for trace in traces], spans)]
    peaks = [trace.peak() for trace in traces]
    if any(peaks) or budget is not None:
        limit = "" if budget is None else f"of {binary_bytes(budget)} budget"
        tiles.append(
            _tile("Peak device memory", traces, peaks, [binary_bytes(p) for p in peaks], limit)
        )
    if any(event.lane == "compute" for trace in traces for event in trace.events):
        part = [busy(trace, "compute") for trace in traces]
        tiles.append(_tile("Compute lanes busy", traces, part, [f"{p:.1%}" for p in part]))
    late = differences(traces[0], traces[1])[:1] if len(traces) == 2 else []
    for one in late:
        where = f"{one.measured.name} on worker {one.measured.worker}"
        tiles.append(_tile("Longest beyond forecast", (), [], [_signed(one.beyond)], where))
    return "\n".join(tiles)


def _signed(beyond: float) -> str:
    return f"{'+' if beyond > 0 else ''}{seconds(beyond)}".replace("-", "\N{MINUS SIGN}")


def _tile(
    name: str, traces: Sequence[Trace], values: Sequence[float], texts: list[str], note: str = ""
) -> str:
    notes = [note] if note else []
    if len(traces) == 2:
        change = signed_percent(values[1], values[0])
        notes.insert(0, f"{texts[0]} predicted, {change}")
    under = html.escape(" · ".join(notes))
    return (
        f'<div class="tile"><span class="name">{html.escape(name)}</span>'
        f'<span class="figure">{html.escape(texts[-1])}</span>'
        f'<span class="note">{under}</span></div>'
    )
