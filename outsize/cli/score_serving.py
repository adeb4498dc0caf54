"""`outsize score` of a table of published serving: what is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outsize.screen import FIGURES, console, say, show, table
from outsize.serve.published import Asked, Forecast, Score, by_source, missed, score

HEADS = ("source", "rows", "end to end", "first token", "each token", "rank")
ROWS = ("line", "model", "load", "layout", "first token", "each token", "request")


def figures(made: Score) -> dict[str, Any]:
    """Under the names that scores of training have, null where serving has nothing of the kind."""
    none = dict.fromkeys(("regret", "oom_precision", "oom_recall", "memory_mape"))
    return {"mape": made.e2e_mape, **asdict(made), **none}


def as_json(rows: Sequence[Asked], made: Sequence[Forecast]) -> dict[str, Any]:
    whole = score(made)
    return {
        **figures(whole),
        "sources": {name: figures(found) for name, found in by_source(made).items()},
        "unforecast": [
            {"line": row.line, "source": row.source, "model": row.model, "why": row.missing}
            for row in rows
            if row.missing
        ],
        "missed": missed(whole),
        "forecasts": [
            {
                "line": row.asked.line,
                "source": row.asked.source,
                "model": row.asked.model,
                "ttft_seconds": row.ttft,
                "tpot_seconds": row.tpot,
                "e2e_seconds": row.e2e,
            }
            for row in made
        ],
    }


def printed(rows: Sequence[Asked], made: Sequence[Forecast], forecasts: bool) -> None:
    out, whole = console(), score(made)
    if forecasts or not any(row.asked.measured for row in made):
        each = table(*ROWS)
        for row in made:
            asked = row.asked
            assert asked.bench is not None, "a row that is forecast has its load"
            load = asked.bench.load
            each.add_row(
                str(asked.line), asked.model,
                f"{load.rate:g}/s {load.prompt:.0f}+{load.output:.0f}",
                f"tensor={asked.layout[0]} x {asked.layout[1]}", f"{row.ttft:.4g} s",
                f"{row.tpot:.4g} s", f"{row.e2e:.4g} s",
            )  # fmt: skip
        show(out, each)
    found = table(*HEADS, right=FIGURES)
    for name, one in (*by_source(made).items(), ("all", whole)):
        found.add_row(name, str(one.rows), *cells(one))
    show(out, found)
    reasons = Counter((row.source, row.missing) for row in rows if row.missing)
    if reasons:
        say(out, f"not forecast: {reasons.total()} rows")
        for (source, why), count in reasons.items():
            say(out, f"  {source}: {count} rows: {why}")
    for line in missed(whole):
        say(out, f"missed: {line}")


def cells(one: Score) -> list[str]:
    """Errors and rank, "-" where there is none."""
    errors = (one.e2e_mape, one.ttft_mape, one.tpot_mape)
    shown = ["-" if error is None else f"{error:.1%}" for error in errors]
    return [*shown, "-" if one.rank is None else f"{one.rank:.2f}"]
