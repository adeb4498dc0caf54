"""Foretold against measured: what is kept, what it teaches, and what it leaves alone."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outsize.simulate.rescaled import by_lane, by_step, lanes
from outsize.train import history
from outsize.train.history import DOUBT, LAST, Entry, learned
from outsize.train.metrics import read_metrics
from outsize.train.resolve import values_of
from outsize.train.setup import set_up

MINE = Entry(
    "2026-11-26T12:00:00+00:00", "a machine", "tiny", "data=2", "float32", "abc", "rates", 8,
    (1.0, 1.0), (100, 100), {"compute": (0.9, 0.9), "fetch": (0.5, 0.5)}, "/runs/one",
)  # fmt: skip


def ran(seconds: float, like: str = "abc", **more: Any) -> Entry:
    return replace(MINE, seconds=(1.0, seconds), like=like, **more)


def invoke(*words: object) -> Result:
    from outsize.cli.main import main

    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_runs_of_the_same_plan_go_before_others_and_the_last_ones_before_earlier_ones() -> None:
    """The middle of the logarithms of so many runs, and half a run of nothing off beside them."""
    old = [ran(9.0) for _ in range(LAST)]
    new = [ran(2.0) for _ in range(LAST - 1)] + [ran(50.0)]
    found = learned([*old, ran(7.0, "other"), *new], MINE, True)
    assert found is not None and found.lanes == {}
    assert found.step == pytest.approx(math.exp(math.log(2) * LAST / (LAST + DOUBT[True])))
    assert f"{LAST} runs of this plan" in found.said
    one = learned([ran(2.0)], MINE, True)
    assert one is not None and 1 < one.step < found.step


def test_other_plans_teach_lane_by_lane_where_lanes_can_be_played_anew() -> None:
    others = [ran(3.0, "x", lanes={"compute": (1.0, 2.0)}), ran(3.0, "y", lanes={"evict": (1, 9)})]
    found = learned(others, MINE, True)
    assert found is not None and set(found.lanes) == {"compute"}
    assert found.lanes["compute"] == pytest.approx(math.exp(math.log(2) / (1 + DOUBT[False])))
    whole = learned(others, MINE, False)
    assert whole is not None and whole.lanes == {}
    assert whole.step == pytest.approx(math.exp(math.log(3) * 2 / (2 + DOUBT[False])))


@pytest.mark.parametrize("other", [{"machine": "another"}, {"by": "blocks"}])
def test_other_machines_and_kinds_of_forecasts_teach_nothing(other: dict[str, Any]) -> None:
    assert learned([ran(2.0, **other)], MINE, True) is None
    assert learned([ran(2.0, "x", mesh="data=4")], MINE, True) is None


def test_a_correction_is_bounded() -> None:
    found = learned([ran(1e6)] * LAST, MINE, True)
    assert found is not None and found.step == history.MOST


def test_lines_that_are_none_are_left_out_and_said_and_the_newest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history.append([ran(1.0 + i) for i in range(8)])
    path = history.where()
    with path.open("a") as file:
        file.write('{"date": 3}\nnot JSON\n')
    found, wrong = history.read()
    assert ([e.seconds[1] for e in found], wrong) == ([1.0 + i for i in range(8)], 2)
    assert "2 lines cannot be read" in invoke("history").output
    monkeypatch.setattr(history, "LARGEST", path.stat().st_size)
    history.append([ran(20.0)])
    left, wrong = history.read()
    assert [e.seconds[1] for e in left] == [6.0, 7.0, 8.0, 20.0] and wrong == 2
    assert "6 lines" in invoke("history", "--clear").output and not path.exists()


def test_processes_that_write_at_once_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    children = []
    for child in range(3):
        if not (pid := os.fork()):
            for i in range(30):
                history.append([ran(1.0 + child + i / 100), ran(2.0)])
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 3
    found, wrong = history.read()
    assert len(found) == 180 and wrong == 0


RUN = """
model: tiny
data: {path: text, validation: 0.1}
train: {steps: 6, batch_tokens: 256, sequence: 64, save_every: 0}
precision: float32
device: cpu
sample: {tokens: 0}
"""


def test_the_next_run_is_foretold_by_what_the_last_one_took(tmp_path, monkeypatch) -> None:
    """And the plan stays: only seconds differ, with the reason beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i} of a text\n" * (60 + i))
    (tmp_path / "run.yaml").write_text(RUN)
    fresh = json.loads(invoke("plan", "run.yaml", "--json").output)
    assert "step time" not in fresh["chosen"]
    assert invoke("train", "run.yaml", "--set", "output=one").exit_code == 0
    said = json.loads(invoke("history", "--json").output)["runs"]
    assert [one["by"] for one in said] == ["rates", "blocks"]
    assert {one["output"] for one in said} == {str(tmp_path / "one")}
    (last,) = [r for r in read_metrics(tmp_path / "one") if "predicted_step_seconds" in r]
    for one in said:
        assert one["seconds"][1] == last["measured_step_seconds"]
        assert one["bytes"] == [last["predicted_peak_bytes"], last["measured_peak_bytes"]]
        assert set(one["lanes"]) == {"compute"} and one["lanes"]["compute"][1] <= one["seconds"][1]
    assert said[1]["seconds"][0] == last["predicted_step_seconds"]

    made = json.loads(invoke("plan", "run.yaml", "--json").output)
    before, after = said[0]["seconds"]
    assert before == fresh["step_seconds"]
    factor = min(history.MOST, (after / before) ** (1 / (1 + DOUBT[True])))
    assert made["step_seconds"] == pytest.approx(before * factor)
    assert "1 run of this plan here" in made["chosen"].pop("step time")
    seconds = dict.fromkeys(("step_seconds", "mean_step_seconds"), made["step_seconds"])
    assert made == {**fresh, **seconds}


def test_lanes_play_anew_and_a_step_is_stretched() -> None:
    """Every lane twice as long is the step twice as long; what a correction is learned from later
    is the forecast without one."""
    sets = ("train.sequence=64", "train.batch_tokens=256", "device=cpu", "mesh=data=2",
            "plan.zero=3")  # fmt: skip
    setup = set_up(values_of(None, ("model.name=tiny", *sets)))
    made = setup.forecast
    busy = lanes(made.trace)
    assert {"compute", "network"} <= set(busy)
    twice, whole = by_lane(made, dict.fromkeys(busy, 2.0)), by_step(made, 2.0)
    assert twice.seconds == pytest.approx(2 * made.seconds) == pytest.approx(whole.seconds)
    assert lanes(twice.trace) == pytest.approx({lane: 2 * spent for lane, spent in busy.items()})
    assert twice.trace.peak() == made.trace.peak()
    slow = by_lane(made, {"network": 50.0})
    assert slow.seconds >= max(made.seconds, 50 * busy["network"])
    assert lanes(slow.trace)["compute"] == pytest.approx(busy["compute"])

    (entry,) = history.noted(setup, "rates").foretold
    history.append([replace(entry, like="other", lanes={"network": (1.0, 8.0)})])
    again = history.corrected(history.noted(setup, "rates"))
    assert again.foretold == (entry,) and entry.seconds == (made.seconds, made.seconds)
    assert again.forecast.seconds == by_lane(made, {"network": 2.0}).seconds > made.seconds
    assert again.plan == setup.plan and dict(again.forecast.why)["step time"].startswith("1 other")
