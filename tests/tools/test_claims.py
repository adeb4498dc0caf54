"""Verdicts of claims (claims/verdict.py) and what runs them (claims/run_all.py)."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

CLAIMS = Path(__file__).parents[2] / "claims"
sys.path.append(str(CLAIMS))

import run_all  # noqa: E402
import verdict  # noqa: E402
from verdict import Figure, judge  # noqa: E402

REACHED = Figure("speed", 1.30, 1.30)


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ((REACHED,), "reached"),
        ((Figure("speed", 1.29, 1.30),), "weaker (speed 1.29x of 1.3x)"),
        ((Figure("bytes", 0.3, 0.25, "%", less=True),), "weaker (bytes 30.0% of 25.0%)"),
        ((Figure("bytes", 0.2, 0.25, "%", less=True),), "reached"),
        ((Figure("speed", 9, 2, other="small"),), "weaker (speed 9x of 2x, but small)"),
        ((Figure("speed", 9, None),), "weaker (speed 9x of no figure)"),
        ((REACHED, Figure("quality", None, 0.2, "%")), "weaker (quality not measured of 20.0%)"),
        ((Figure("speed", 1.7, 1.8, bound=1.7, other="a disk"),), "reached"),
        ((Figure("speed", 1.0, 1.3),), "absent (speed 1x of 1.3x)"),
        ((Figure("speed", None, 1.3),), "absent (speed not measured of 1.3x)"),
        ((Figure("memory", 0.0, 0.6, "%", nothing=0.0),), "absent (memory 0.0% of 60.0%)"),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_figures(figures, word):
    assert judge(figures, {})[0] == word


def test_numbers_that_differ_leave_nothing_of_a_claim():
    assert judge((REACHED,), {"equal": True})[0] == "reached"
    assert judge((REACHED,), {"equal": False})[0] == "absent (not so: equal)"


def test_how_is_that_of_the_least_direct_figure():
    for hows, least in (
        (("run", "run"), "run"),
        (("run", "emulated links"), "emulated links"),
        (("emulated devices", "emulated links"), "emulated devices"),
        (("simulated", "run", "emulated links"), "simulated"),
    ):
        assert judge(tuple(Figure("x", 2, 2, how=how) for how in hows), {})[1] == least


def test_each_way_in_which_figures_were_had_has_its_verdict(monkeypatch, tmp_path, capsys):
    figures = Figure("x", 1.5, 2, how="simulated"), Figure("y", 3, 2), Figure("z", 2, 2)
    assert verdict.parts(figures) == {
        "run": ("reached", figures[1:]), "simulated": ("weaker (x 1.5x of 2x)", figures[:1])
    }  # fmt: skip
    assert verdict.parts([Figure("t", None, 2)])["run"][0] == "not measured"
    assert ended(monkeypatch, tmp_path, 0.0, *figures)[0] == 3
    assert "run: reached; simulated: weaker (x 1.5x of 2x)" in capsys.readouterr().out


def ended(monkeypatch, folder, load, *figures):
    """The exit code of a claim, and what is kept of it."""
    monkeypatch.setattr(verdict, "RESULTS", folder)
    monkeypatch.setattr(verdict, "BEGAN", load)
    monkeypatch.setattr(verdict.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(sys, "argv", [str(CLAIMS / "gpipe.py")])
    with pytest.raises(SystemExit) as left:
        verdict.conclude("A paper", "fast", "fast", "here", *figures)
    kept = folder / "gpipe.json"
    return left.value.code, json.loads(kept.read_text()) if kept.exists() else None


@pytest.mark.parametrize(
    ("ours", "code", "word"), [(2.0, 0, "reached"), (1.5, 3, "weaker"), (1.0, 1, "absent")]
)
def test_a_claim_ends_with_its_code_and_keeps_its_result(monkeypatch, tmp_path, ours, code, word):
    left, kept = ended(monkeypatch, tmp_path, 0.0, Figure("speed", ours, 2.0, timed=True))
    assert left == code
    assert kept["verdict"].split(" ")[0] == word
    assert kept["script"] == verdict.digest("gpipe")
    told = {"name", "claimed", "measured", "how", "conditions", "date", "processor", "seconds"}
    assert told <= set(kept)
    assert kept["figures"][0]["ours"] == ours


def test_seconds_of_a_busy_machine_are_not_kept(monkeypatch, tmp_path, capsys):
    _, kept = ended(monkeypatch, tmp_path, 9.0, Figure("speed", 2.0, 2.0, timed=True))
    assert kept is None
    assert "the load is 9.0, over 2.5" in capsys.readouterr().out
    assert ended(monkeypatch, tmp_path, 9.0, Figure("bytes", 2.0, 2.0))[1] is not None


def test_every_script_concludes_once_and_says_nothing_else_of_a_verdict():
    assert len(run_all.scripts()) > 40
    for name in run_all.scripts():
        tree = ast.parse((CLAIMS / f"{name}.py").read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        concluding = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "conclude"]
        assert len(concluding) == 1, name


def test_quick_claims_judge_no_seconds():
    for name in run_all.QUICK:
        assert name in run_all.scripts()
        assert "timed=True" not in (CLAIMS / f"{name}.py").read_text(), name


def test_the_table_shows_what_was_and_what_is(tmp_path):
    verdict.keep({"name": "a", "verdict": "reached"}, tmp_path)
    assert run_all.last("a", tmp_path) == "reached"
    assert run_all.last("b", tmp_path) == ""
    printed = "paper      x\nverdict    weaker (1x of 2x)\nhow        run\n"
    now, how = run_all.verdict_of(printed), run_all.verdict_of(printed, "how")
    rows = [run_all.Row("a", "reached", now, how, 1.4), run_all.Row("b", "", "", "", 2.0)]
    assert run_all.table(rows).splitlines()[2:] == [
        "| a | reached | weaker (1x of 2x) | run | 1 |",
        "| b | - | CRASHED | - | 2 |",
    ]


@pytest.mark.parametrize(
    ("before", "now", "quick", "bad"),
    [
        ("weaker (1x of 2x)", "weaker (1.1x of 2x)", True, False),
        ("reached", "weaker (1x of 2x)", True, True),
        ("reached", "weaker (1x of 2x)", False, False),
        ("", "weaker (1x of 2x)", True, False),
        ("weaker (1x of 2x)", "", False, True),
        ("", "", True, True),
    ],
)
def test_a_crash_ends_a_build_and_so_does_a_quick_claim_that_falls(before, now, quick, bad):
    assert bool(run_all.failed([run_all.Row("a", before, now, "run", 1.0)], quick)) is bad
