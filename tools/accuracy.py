"""Constants of foresight, and docs/accuracy.md: score tables by publication with their worst rows.

python tools/accuracy.py --fit    # constants anew from the package's table, with each left out
python tools/accuracy.py          # docs/accuracy.md from them
python tools/accuracy.py --check  # exit code 1 where the page is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from outsize.foresight.fitted import FILE, half, refit
from outsize.foresight.runs import shipped
from outsize.foresight.score import Bar, Report, Row, Score, bars, forecasts, report, score, worst
from outsize.serve import published as serving

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
CONSTANTS = ROOT / "outsize" / "foresight" / "data" / FILE
GIVEN = 3  # runs of each source, of the section on calibration
HEADS = ("source", "rows", "timed", "error", "bias", "rank", "regret", "OOM precision",
         "OOM recall", "memory", "in interval")  # fmt: skip


def page() -> str:
    """The page as it is to be."""
    runs = list(shipped())
    apart, whole, given = report(runs, True), report(runs), report(runs, True, GIVEN)
    parts = (_opening(apart), _table(apart), _bars(apart), _within(whole), _given(given),
             _serving(), _missing(apart), _worst(apart))  # fmt: skip
    return "\n".join(line for part in parts for line in part) + "\n"


def _opening(made: Report) -> Iterator[str]:
    yield "# Accuracy on published runs"
    yield ""
    yield "```text"
    yield "outsize score --each-source-out"
    yield "```"
    yield ""
    yield (
        f"Forecasts of the {len(made.rows) + len(made.missing)} rows of published training runs"
        " that ship with the package\n(`outsize/foresight/data/published_training.csv`), each with"
        " constants that were fitted without\nits own publication. `tools/accuracy.py` writes this"
        " page. A publication is what one group reports\nof one system: all trials of a sweep, all"
        " releases of one container, count as one."
    )
    yield ""
    yield (
        "- **error**: mean of |forecast / measured - 1| of step times; **bias**: its mean with"
        " sign.\n- **rank**: Spearman's correlation within sweeps (model, devices and length alike,"
        " 5 runs or more);\n  **regret**: by how much the run that is forecast to be the fastest is"
        " slower than the fastest.\n- **OOM precision, recall**: of saying that memory runs out, in"
        " publications that report such runs.\n- **memory**: mean error of bytes; **in interval**:"
        " rows whose step time lies in the interval printed\n  with the forecast."
    )
    yield ""


def _table(made: Report) -> Iterator[str]:
    yield "| " + " | ".join(HEADS) + " |"
    yield "| --- |" + " ---: |" * (len(HEADS) - 1)
    for name, found in (*made.sources.items(), ("**all**", made.whole)):
        yield "| " + " | ".join([name, *_cells(found)]) + " |"
    yield ""


def _cells(found: Score) -> list[str]:
    def part(value: float | None, form: str = ".1%") -> str:
        return "" if value is None else format(value, form)

    return [
        str(found.rows), str(found.timed), part(found.mape), part(found.bias, "+.1%"),
        part(found.rank, ".2f"), part(found.regret), part(found.oom_precision, ".3f"),
        part(found.oom_recall, ".3f"), part(found.memory_mape), part(found.inside, ".0%"),
    ]  # fmt: skip


def _bars(made: Report) -> Iterator[str]:
    found = bars(made)
    yield "## Bars"
    yield ""
    yield (
        "What is aimed at, and what is reached. `outsize score` exits with 1 as long as one is"
        " missed."
    )
    yield ""
    yield "| figure | reached | bar | |"
    yield "| --- | ---: | ---: | --- |"
    for bar in found:
        yield _bar(bar)
    yield ""


def _bar(bar: Bar) -> str:
    sign, kept = "<" if bar.under else ">", "missed" if bar.missed else "reached"
    return f"| {bar.what} | {bar.value:.3f} | {sign} {bar.bound:g} | {kept} |"


def _within(made: Report) -> Iterator[str]:
    yield "## With all publications known"
    yield ""
    yield (
        f"`outsize score` alone takes constants fitted on all rows: step times err by"
        f" {made.whole.mape or 0:.1%} over all\nrows. That is how far the model's form reaches; the"
        " difference to the table above is what is not known\nof software that nobody else has"
        " published runs of."
    )
    yield ""
    rows = forecasts([run for run in shipped() if not run.missing], half)
    yield (
        "A second hold-out cuts the models of every publication in two by a hash of their names:"
        " constants fitted\non one half forecast the other, step times off by"
        f" {score(rows).mape or 0:.1%} over all rows and by\n"
        f"{score([row for row in rows if row.known]).mape or 0:.1%} where device and precision"
        " occur in another publication."
    )
    yield ""


def _given(made: Report) -> Iterator[str]:
    yield f"## With {GIVEN} runs of each source given"
    yield ""
    yield (
        f"`outsize score --each-source-out --given {GIVEN}`: {GIVEN} measured runs of each source"
        " (as the table names it; chosen by\nforecasts alone, and not scored) correct the forecasts"
        " of the others."
    )
    yield ""
    yield "| figure | reached | bar | |"
    yield "| --- | ---: | ---: | --- |"
    for bar in bars(made):
        if "elsewhere" in bar.what:
            yield _bar(bar)
    yield ""


def _serving() -> Iterator[str]:
    rows = serving.shipped()
    made = serving.forecasts(rows)
    whole, left = serving.score(made), sum(bool(row.missing) for row in rows)
    yield "## Serving"
    yield ""
    yield (
        f"Of the {len(rows)} rows of `outsize/foresight/data/{serving.SHIPPED}`, {len(made)} say"
        f" their load and are forecast:\n`outsize score TABLE`. Their requests are played through"
        " the engine's policies and books of pages, with steps\npriced from the device's sheet"
        f" (`outsize/serve/described.py`); nothing is fitted. The other {left} have no rate of"
        " requests,\nno model, or figures that their notes call mis-scaled. Constants were chosen"
        " with the table in view.\nWhat the table leaves out is read from its sources"
        " (`outsize/foresight/data/served.yaml`): how many requests, how\nlong their prompts, and"
        " which servers ran on from one run to the next, whose means are of all of them."
    )
    yield ""
    yield "| figure | reached | bar | |"
    yield "| --- | ---: | ---: | --- |"
    for name, bound in serving.BARS.items():
        if (value := getattr(whole, name)) is not None:
            what = {"ttft_mape": "first token", "tpot_mape": "each token"}.get(name, "end to end")
            yield _bar(Bar(what, value, bound, under=True))
    if whole.rank is not None:
        what = "rank within sweeps of a model and workload"
        yield _bar(Bar(what, whole.rank, serving.RANK, under=False))
    yield ""


def _missing(made: Report) -> Iterator[str]:
    yield "## Rows that are not forecast"
    yield ""
    count: dict[tuple[str, str], int] = {}
    for run in made.missing:
        key = (run.source.name, run.missing)
        count[key] = count.get(key, 0) + 1
    for (name, why), rows in count.items():
        yield f"- {name}: {rows}, {why}"
    yield ""


def _worst(made: Report) -> Iterator[str]:
    yield "## Ten worst rows of each source"
    for name in made.sources:
        rows = worst([row for row in made.rows if row.run.source.name == name])
        if not rows:
            continue
        yield ""
        yield f"### {name}"
        yield ""
        yield "| line | model | device | layout | measured | forecast | off |"
        yield "| ---: | --- | --- | --- | ---: | ---: | ---: |"
        for row in rows:
            yield _line(row)


def _line(row: Row) -> str:
    run, lay = row.run, row.run.layout
    assert lay is not None
    mesh = f"{lay.devices}: t{lay.tensor} p{lay.pipeline} c{lay.context} e{lay.expert}"
    rest = f"{lay.rows} of {lay.batch} x {lay.sequence}, {lay.recompute}, {lay.precision}"
    return (
        f"| {run.line} | {run.model} | {run.device} | {mesh}; {rest} |"
        f" {row.measured or 0:.4g} s | {row.seconds:.4g} s | {row.error or 0:+.0%} |"
    )


def main(arguments: list[str]) -> int:
    """Fit, write or check; gives the exit code."""
    if "--fit" in arguments:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in refit().items()]
        CONSTANTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    if "--check" in arguments:
        same = PAGE.exists() and PAGE.read_text() == page()
        print(f"{PAGE.name}: {'as it is to be' if same else 'run python tools/accuracy.py'}")
        return 0 if same else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
