"""Forecasts corrected by a few runs of their source (`outsize score --given`)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from outsize.cli.main import main
from outsize.foresight.given import KNOWN, OWN, PARTS, chosen, corrected, covariance, sources
from outsize.foresight.runs import COLUMNS, data, shipped
from outsize.foresight.score import Row, forecasts


def rows_of(name: str) -> list[Row]:
    runs = [run for run in shipped() if name in run.table and not run.missing]
    return forecasts(runs, lambda run: run.source.name)


def fast(row: Row, factor: float) -> Row:
    """As if it had been measured to take so many times its forecast."""
    return replace(row, run=replace(row.run, metric="step_time_s", value=row.seconds * factor))


def test_runs_that_share_everything_take_the_mean_shrunk_by_their_own_part() -> None:
    """n like runs off by d: the next is off by d n v / (n v + own^2), v the shared variance, of
    which a part is left where others have published runs of the device and precision."""
    (row, *_) = rows_of("MooreThreads/SimuMax")
    assert row.run.layout is not None
    made = [
        replace(row, run=replace(row.run, line=i, layout=replace(row.run.layout, batch=8 * i)))
        for i in range(1, 5)
    ]
    late = [fast(each, 1.3) for each in made]
    better, given = corrected(late, 3)
    shared = KNOWN**2 * sum(part**2 for part in PARTS.values())
    expected = math.log(1.3) * 3 * shared / (3 * shared + OWN**2)
    assert len(better) == 1 and len(given) == 3
    assert math.log(better[0].seconds / row.seconds) == pytest.approx(expected, rel=1e-12)
    left = shared + OWN**2 - 3 * shared**2 / (3 * shared + OWN**2)
    assert math.log(better[0].high / better[0].seconds) == pytest.approx(1.645 * math.sqrt(left))


def test_what_two_runs_share() -> None:
    one, other = (rows_of(name)[0].run for name in ("MooreThreads/SimuMax", "InternEvo"))
    assert covariance([one], [one])[0, 0] == pytest.approx(sum(p**2 for p in PARTS.values()))
    both = covariance([one], [other])[0, 0]  # 16 bits, dense layers
    assert both == pytest.approx(PARTS["layers"] ** 2 + PARTS["precision"] ** 2)


def test_the_choice_hangs_on_no_measured_value_and_no_order() -> None:
    rows = rows_of("Megatron-Bridge performance-summary-archive.md 26.02.01")
    kept = [[row.run.line for row in each] for each in chosen(rows, 3)]
    other = [fast(row, 1 + i % 7) for i, row in enumerate(rows[::-1])]
    again = [sorted(row.run.line for row in each) for each in chosen(other, 3)]
    assert [sorted(lines) for lines in kept] == again and len(kept) == 3
    models = {each[0].run.model for each in chosen(rows, 3)}
    assert len(models) == 3  # what there is most to learn of


def test_trials_of_a_sweep_are_one_source() -> None:
    found = sources(rows_of("Aleph Alpha"), 3)
    assert len(found) == 1 and len(found[0]) == 519


def test_nothing_measured_is_nothing_corrected(tmp_path: Path) -> None:
    made = json.loads(_score(tmp_path, blank=True, given=3).output)
    plain = json.loads(_score(tmp_path, blank=True).output)
    assert made["forecasts"] == plain["forecasts"] and made["given"] == []


def test_given_rows_are_named_and_not_scored(tmp_path: Path) -> None:
    made, plain = (json.loads(_score(tmp_path, given=n).output) for n in (3, 0))
    assert made["rows"] == plain["rows"] - len(made["given"]) and len(made["given"]) >= 3
    assert not {each["line"] for each in made["forecasts"]} & set(made["given"])
    assert made["mape"] < plain["mape"]
    assert _score(tmp_path, given=101).exit_code == 2


def _score(tmp_path: Path, blank: bool = False, given: int = 0) -> Any:
    lines = data("published_training.csv").splitlines()
    text = "\n".join([lines[0], *(line for line in lines if "VocabularyParallelism" in line)])
    path = tmp_path / "table.csv"
    if blank:
        index = COLUMNS.index("measured_value")
        rows = [line.split(",") for line in text.splitlines()]
        text = "\n".join(
            ",".join("" if i and j in (index, index - 1) else cell for j, cell in enumerate(row))
            for i, row in enumerate(rows)
        )
    path.write_text(text + "\n")
    words = ["score", str(path), "--each-source-out", "--json"]
    return CliRunner().invoke(main, [*words, *(["--given", str(given)] if given else [])])


@pytest.mark.parametrize(("every", "left"), [(False, 0.125), (True, 0.135)])
def test_devices_that_nobody_else_has_are_less_off(every: bool, left: float) -> None:
    """Bridge's fp4, GB200 and the like, each release with three runs known; with recurrent models
    as well, three have one sort more to teach."""
    rows = [r for r in rows_of("Megatron-Bridge") if every or not recurrent(r)]
    better, _ = corrected(rows, 3)

    def off(some: list[Row]) -> float:
        return float(np.mean([abs(row.error or 0.0) for row in some if not row.known]))

    assert off(better) < min(left, 0.95 * off(rows))


def recurrent(row: Row) -> bool:
    assert row.run.shape is not None
    return row.run.shape.parts.recurring > 0
