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
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from outsize.errors import OutsizeError
from outsize.report.totals import KindTotal, busy, totals
from outsize.report.units import binary_bytes, seconds, signed_percent
from outsize.trace import Trace
from outsize.trace.text import write_text

KINDS = (  # the order of the legend; others follow by name
    *("FORWARD", "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "RECOMPUTE", "PREFILL"),
    *("DECODE", "UPDATE", "SEND", "RECV", "GATHER", "RELEASE", "REDUCE", "FETCH", "EVICT"),
)
SCRIPTS = ("model", "lanes", "memory", "hand")  # one scope, in this order
LANES = ("compute", "network", "copy", "host", "disk")  # from the top; others follow by name


def timeline(*traces: Trace, budget: int | None = None, title: str = "Timeline") -> str:
    """The page of one trace, or of a foretold and a measured one over each other.

    budget: bytes of the device tier, drawn as a line. Raises OutsizeError for other numbers of
    traces, or two of one source.
    """
    sources = [trace.source for trace in traces]
    if not 1 <= len(traces) <= 2 or len(set(sources)) != len(sources):
        given = ", ".join(sources) or "none"
        raise OutsizeError(
            f"timeline of traces: {given}; expected one trace, or one foretold and one measured"
        )
    ordered = sorted(traces, key=lambda trace: trace.source)  # foretold first
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
        table=_table(ordered),
        meta=_meta(ordered),
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
        "traces": [_columns(trace, kinds, keys, lanes) for trace in traces],
    }


def _rank(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    return order.index(name) if name in order else len(order), name


def _columns(
    trace: Trace, kinds: list[str], keys: list[str], lanes: list[tuple[int, str]]
) -> dict[str, Any]:
    """Times in seconds from the trace's own first start; live bytes -1 where an event is silent."""
    origin = min((event.start for event in trace.events), default=0.0)
    events = sorted(trace.events, key=lambda event: (event.start, event.end))
    lane_number = {lane: i for i, lane in enumerate(lanes)}
    kind_number = {kind: i for i, kind in enumerate(kinds)}
    return {
        "source": trace.source,
        "lane": [lane_number[e.worker, e.lane] for e in events],
        "kind": [kind_number[e.kind] for e in events],
        "stage": [e.stage for e in events],
        "microbatch": [e.microbatch for e in events],
        "start": [round(e.start - origin, 9) for e in events],
        "end": [round(e.end - origin, 9) for e in events],
        "peak": [e.peak for e in events],
        "live": [[e.live.get(key, 0) if e.live else -1 for e in events] for key in keys],
    }


def _subtitle(traces: Sequence[Trace]) -> str:
    workers = len({event.worker for trace in traces for event in trace.events})
    actions = max(len(trace.events) for trace in traces)
    what = " over ".join(trace.source for trace in traces)
    plural = "" if workers == 1 else "s"
    return f"{what.capitalize()} · {workers:,} worker{plural} · {actions:,} actions"


def _tiles(traces: Sequence[Trace], budget: int | None) -> str:
    """The few figures that matter, foretold beside measured where there are both."""
    peaks = [trace.peak() for trace in traces]
    limit = "" if budget is None else f"of {binary_bytes(budget)} budget"
    tiles = [
        _tile("Makespan", traces, [t.span() for t in traces], [seconds(t.span()) for t in traces]),
        _tile("Peak device memory", traces, peaks, [binary_bytes(p) for p in peaks], limit),
    ]
    if any(event.lane == "compute" for trace in traces for event in trace.events):
        part = [busy(trace, "compute") for trace in traces]
        tiles.append(_tile("Compute lanes busy", traces, part, [f"{p:.1%}" for p in part]))
    return "\n".join(tiles)


def _tile(
    name: str, traces: Sequence[Trace], values: Sequence[float], texts: list[str], note: str = ""
) -> str:
    notes = [note] if note else []
    if len(traces) == 2:
        change = signed_percent(values[1], values[0])
        notes.insert(0, f"{texts[0]} foretold, {change}")
    under = html.escape(" · ".join(notes))
    return (
        f'<div class="tile"><span class="name">{html.escape(name)}</span>'
        f'<span class="figure">{html.escape(texts[-1])}</span>'
        f'<span class="note">{under}</span></div>'
    )


def _table(traces: Sequence[Trace]) -> str:
    """Totals by kind of action; with two traces the foretold seconds and the difference too."""
    main = totals(traces[-1])
    before = {total.kind: total for total in totals(traces[0])} if len(traces) == 2 else {}
    gone = [KindTotal(kind, 0, 0.0, 0.0) for kind in before if kind not in {t.kind for t in main}]
    heads = ["Action", "Count", "Total", "Share of all action time", "Mean"]
    heads += ["Foretold total", "Difference"] if len(traces) == 2 else []
    rows = "\n".join(_row(total, before, len(traces) == 2) for total in (*main, *gone))
    return (
        "<thead><tr>"
        + "".join(f'<th scope="col">{head}</th>' for head in heads)
        + f"</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    )


def _row(total: KindTotal, before: dict[str, KindTotal], compared: bool) -> str:
    kind = html.escape(total.kind)
    bar = f'<span class="share"><i style="width:{total.share:.2%}"></i></span>'
    cells = [
        f"{total.count:,}",
        seconds(total.seconds),
        f"{bar}<span>{total.share:.1%}</span>",
        seconds(total.mean) if total.count else "–",
    ]
    if compared:
        old = before.get(total.kind)
        cells.append(seconds(old.seconds) if old else "–")
        cells.append(signed_percent(total.seconds, old.seconds) if old else "–")
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row"><i class="swatch" data-kind="{kind}"></i>{kind}</th>{body}</tr>'


def _meta(traces: Sequence[Trace]) -> str:
    """What the traces say about themselves, as a list; nothing when they say nothing."""
    items = [
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
        for key, value in sorted({kv for trace in traces for kv in trace.meta.items()})
    ]
    return f'<section class="card"><h2>Run</h2><dl>{"".join(items)}</dl></section>' if items else ""
