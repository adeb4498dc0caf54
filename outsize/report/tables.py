"""Tables of the timeline page: what took longest beyond forecast, and times by kind and worker."""

from __future__ import annotations

import html
from collections.abc import Sequence

from outsize.report.totals import KindTotal, computing, totals
from outsize.report.units import seconds, signed_percent
from outsize.trace import Difference, Trace, differences

LONGEST = 10  # actions of the table of those beyond forecast


def beyond_card(traces: Sequence[Trace]) -> str:
    """The actions that took longest beyond forecast; nothing where none did."""
    if len(traces) < 2:
        return ""
    found = [one for one in differences(traces[0], traces[1]) if one.beyond > 0][:LONGEST]
    if not found:
        return ""
    places = {id(event): place for place, event in enumerate(traces[1].events)}
    heads = ["Action", "Worker", "Predicted", "Measured", "Beyond forecast", ""]
    rows = [_late(one, places[id(one.measured)], found[0].beyond) for one in found]
    waited = any(one.waited for one in found)
    note = " Waiting for other workers is not counted." if waited else ""
    hint = f'<p class="hint">Click an action to see it in the timeline.{note}</p>'
    return _card(f"<h2>Longest beyond forecast</h2>{_table(heads, rows)}{hint}")


def _late(one: Difference, place: int, most: float) -> str:
    name = html.escape(one.measured.name)
    cells = [
        str(one.measured.worker),
        seconds(one.expected),
        seconds(one.took),
        f"+{seconds(one.beyond)}",
        f"{_bar(one.beyond / most)}<span>{signed_percent(one.took, one.expected)}</span>",
    ]
    button = f'<button data-event="{place}" title="Show it">{name}</button>'
    return _line(f"{_swatch(one.measured.kind)}{button}", cells)


def workers_card(traces: Sequence[Trace]) -> str:
    """What each worker computes and how long it is idle; nothing for one worker."""
    workers = sorted({worker for trace in traces for worker in trace.workers})
    if len(workers) < 2:
        return ""
    heads = ["Worker", "Computing", "Idle"]
    heads += ["Predicted", "Difference", "Predicted idle"] if len(traces) == 2 else []
    spent, spans = [computing(trace) for trace in traces], [trace.span() for trace in traces]
    rows = []
    for worker in workers:
        now = spent[-1].get(worker, 0.0)
        cells = [seconds(now), _idle(now, spans[-1])]
        if len(traces) == 2:
            before = spent[0].get(worker, 0.0)
            cells += [seconds(before), signed_percent(now, before), _idle(before, spans[0])]
        rows.append(_line(f"worker {worker}", cells))
    return _card(f"<h2>Time by worker</h2>{_table(heads, rows)}")


def _idle(spent: float, span: float) -> str:
    return f"{1 - spent / span:.1%}" if span else "–"


def kinds_card(traces: Sequence[Trace]) -> str:
    """Totals by kind of action; with two traces the predicted seconds and the difference too."""
    main = totals(traces[-1])
    compared = len(traces) == 2
    before = {total.kind: total for total in totals(traces[0])} if compared else {}
    gone = [KindTotal(kind, 0, 0.0, 0.0) for kind in before if kind not in {t.kind for t in main}]
    waits = any(total.waited for total in main)
    heads = ["Action", "Count", "Total", "Share of all action time", "Mean"]
    heads += ["Waiting for others"] if waits else []
    heads += ["Predicted total", "Difference"] if compared else []
    rows = [
        _kind(total, waits, before.get(total.kind) if compared else total, compared)
        for total in (*main, *gone)
    ]
    return _card(f"<h2>Time by kind of action</h2>{_table(heads, rows)}")


def _kind(total: KindTotal, waits: bool, old: KindTotal | None, compared: bool) -> str:
    cells = [
        f"{total.count:,}",
        seconds(total.seconds),
        f"{_bar(total.share)}<span>{total.share:.1%}</span>",
        seconds(total.mean) if total.count else "–",
    ]
    if waits:
        cells.append(seconds(total.waited) if total.waited else "–")
    if compared:
        cells.append(seconds(old.seconds) if old else "–")
        cells.append(signed_percent(total.own, old.own) if old else "–")
    return _line(f"{_swatch(total.kind)}{html.escape(total.kind)}", cells)


def meta_card(traces: Sequence[Trace]) -> str:
    """What the traces say about themselves, as a list; nothing when they say nothing."""
    items = [
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
        for key, value in sorted({kv for trace in traces for kv in trace.meta.items()})
    ]
    return _card(f"<h2>Run</h2><dl>{''.join(items)}</dl>") if items else ""


def _card(content: str) -> str:
    return f'<section class="card">{content}</section>\n'


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """heads are the page's own words, rows are markup."""
    cells = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "\n".join(rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def _line(head: str, cells: Sequence[str]) -> str:
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{head}</th>{body}</tr>'


def _swatch(kind: str) -> str:
    return f'<i class="swatch" data-kind="{html.escape(kind)}"></i>'


def _bar(share: float) -> str:
    return f'<span class="share"><i style="width:{share:.2%}"></i></span>'
