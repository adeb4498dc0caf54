"""`outsize schedule`: figures, files, comparison, and what it refuses."""

from __future__ import annotations

import json

import pytest

from outsize.schedule.csv import from_csv
from outsize.schedule.pipelines import zb_v


def figures(invoke, *words):
    result = invoke("schedule", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_figures_are_those_of_the_golden_table(invoke):
    got = figures(invoke, "zb-v", "--devices", 4, "--microbatches", 8, "--times", "1,1.2,0.8")
    assert got["makespan"] == 25.8 and got["max_idle_in_makespan"] == 1.8
    assert got["max_idle_in_rank_span"] == 0.8 and got["peak_act_per_rank"] == [4, 4, 4, 4]
    words = ("--devices", 4, "--microbatches", 8, "--overlapped", 2.4)
    got = figures(invoke, "DualPipe", *words)
    assert got["makespan"] == 23.6 and got["peak_act_per_rank"] == [5, 5, 5, 5]
    got = figures(invoke, "interleaved", "--devices", 4, "--microbatches", 8, "--chunks", 4)
    assert got["makespan"] == 26.25 and got["stages"] == 16
    got = figures(invoke, "hanayo", "--devices", 4, "--microbatches", 4, "--waves", 1)
    assert got["makespan"] == 18
    got = figures(invoke, "1f1b", "--devices", 3, "--microbatches", 1, "--comm-time", 0.5)
    assert got["makespan"] == 9 + 4 * 0.5
    got = figures(invoke, "skip-pipe", "--devices", 4, "--microbatches", 8, "--skip", 0.5)
    assert got["approximate"].startswith("each microbatch skips 2 of 4 stages")


def test_a_person_reads_the_same(invoke):
    result = invoke("schedule", "gpipe", "--devices", 2, "--microbatches", 4)
    assert result.exit_code == 0
    assert "GPipe: 2 devices, 2 stages, 4 microbatches" in result.stdout
    assert "makespan 15, at most 3 of it idle (20.0%)" in result.stdout


def test_csv_and_html_are_written_and_the_csv_read_back(invoke, tmp_path):
    words = ("--devices", 3, "--microbatches", 5)
    page, table = tmp_path / "zb.html", tmp_path / "zb.csv"
    result = invoke("schedule", "zb-v", *words, "--html", page, "--csv", table)
    assert result.exit_code == 0
    assert from_csv(table.read_text()).schedule == zb_v(3, 5).schedule
    assert "Schedule ZB-V" in page.read_text() and "BACKWARD_WEIGHT" in page.read_text()
    again = figures(invoke, table)
    straight = figures(invoke, "zb-v", *words)
    assert {**again, "schedule": ""} == {**straight, "schedule": ""}


def test_compare_ranks_and_says_why_not(invoke):
    words = ("--devices", 4, "--microbatches", 4, "--memory", 3)
    ranked = figures(invoke, "compare", *words)
    spans = [one["makespan"] for one in ranked if one["makespan"] is not None]
    assert spans == sorted(spans) and len(ranked) == 18
    assert all(one["peak"] <= 3 for one in ranked if one["peak"] is not None)
    why = {one["schedule"]: one["why"] for one in ranked}
    assert why["gpipe"] == "holds 4 microbatches, above the cap of 3"
    assert "expected at least 8" in why["dualpipe"]
    auto = figures(invoke, "auto", *words)
    assert auto["makespan"] == spans[0]
    result = invoke("schedule", "compare", "--devices", 2, "--microbatches", 3, "--memory", 2)
    assert "holds 3 microbatches, above the cap of 2" in " ".join(result.stdout.split())


SIZE = ("--devices", 4, "--microbatches", 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dualpip", *SIZE), "schedule 'dualpip': unknown; did you mean 'dualpipe'?"),
        (("chimera", "--devices", 3, "--microbatches", 8), "the nearest is 4"),
        (("gpipe", "--devices", 4), "--microbatches: missing; expected a number"),
        (("gpipe", *SIZE, "--times", "1,2"), "--times: '1,2'; expected three numbers"),
        (("gpipe", *SIZE, "--times", "1,-2,1"), "expected seconds, not negative"),
        (("gpipe", *SIZE, "--waves", 2), "waves is 2; it has no such choice"),
        (("gpipe", *SIZE, "--memory", 2), "--memory: 2.0; there is no such choice for 'gpipe'"),
        (("compare", *SIZE, "--waves", 2), "--waves: 2; there is no such choice for compare"),
        (("compare", *SIZE, "--html", "x.html"), "--html: x.html; there is no such choice"),
        (("auto", *SIZE, "--memory", 0), "memory cap: 0 microbatches; expected at least 1"),
        (("none.csv",), "none.csv cannot be read"),
        (("none.csv", *SIZE), "--devices: 4; there is no such choice for a CSV"),
        (("chimera", *SIZE, "--csv", "x.csv"), "stages on two workers"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(invoke, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = invoke("schedule", *words)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_broken_csv_says_line_and_reason(invoke, tmp_path):
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    result = invoke("schedule", path)
    assert result.exit_code == 2 and "broken.csv line 2: '1X0' is no action" in result.stderr


def test_a_vocabulary_on_the_last_stage_and_cut_over_the_workers(invoke):
    words = ("1f1b", "--devices", 4, "--microbatches", 8, "--vocabulary-times", "2,2,2")
    whole = figures(invoke, *words)
    assert whole["makespan"] == 8 * (3 + 6) + 3 * 3 and whole["vocabulary"] is None
    for variant, peak in ((1, 6), (2, 5)):
        got = figures(invoke, *words, "--vocabulary", variant)
        assert got["schedule"] == f"1F1B with vocabulary {variant}"
        assert got["vocabulary"] == variant and max(got["peak_act_per_rank"]) == peak
        assert got["makespan"] <= 8 * (3 + 6 / 4) + 3 * 3
        assert [got["makespan"] - idle for idle in got["idle_in_makespan"]] == [36.0] * 4


def test_an_input_layer_has_times_too(invoke):
    words = ("1f1b", "--devices", 4, "--microbatches", 8, "--vocabulary-times", "2,2,2,1,3")
    whole, cut = figures(invoke, *words), figures(invoke, *words, "--vocabulary", 1)
    assert whole["makespan"] - whole["idle_in_makespan"][0] == 8 * (3 + 4)
    assert cut["makespan"] - cut["idle_in_makespan"][0] == 8 * (3 + 10 / 4)


def test_a_vocabulary_of_a_csv(invoke, tmp_path):
    table = tmp_path / "zb.csv"
    assert invoke("schedule", "zb-h1", "--devices", 3, "--microbatches", 5, "--csv", table)
    words = ("--vocabulary-times", "2,2,2", "--vocabulary", 2)
    straight = figures(invoke, "zb-h1", "--devices", 3, "--microbatches", 5, *words)
    assert {**figures(invoke, table, *words), "schedule": ""} == {**straight, "schedule": ""}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("1f1b", "--vocabulary", 1), "--vocabulary: 1, and no --vocabulary-times"),
        (("1f1b", "--vocabulary", 3, "--vocabulary-times", "1,1,1"), "variant 3; expected 1"),
        (
            ("1f1b", "--vocabulary-times", "1,1"),
            "--vocabulary-times: '1,1'; expected three or five",
        ),
        (("compare", "--vocabulary", 2), "--vocabulary: 2, and no --vocabulary-times"),
        (("auto", "--vocabulary", 1, "--vocabulary-times", "1,1,1"), "no such choice for auto"),
    ],
)
def test_a_vocabulary_that_cannot_be_cut_is_refused(invoke, words, reason):
    result = invoke("schedule", *words, "--devices", 4, "--microbatches", 8)
    assert result.exit_code == 2 and reason in result.stderr


def test_compare_ranks_schedules_with_their_vocabulary_cut(invoke):
    words = ("--devices", 4, "--microbatches", 6, "--vocabulary-times", "3,3,3")
    whole = figures(invoke, "compare", *words)
    cut = figures(invoke, "compare", *words, "--vocabulary", 2, "--memory", 5)
    assert [one["makespan"] for one in whole] == sorted(
        (one["makespan"] for one in whole), key=lambda span: (span is None, span)
    )
    spans = {one["schedule"]: one["makespan"] for one in cut if one["makespan"] is not None}
    assert spans["auto"] == min(spans.values()) < min(one["makespan"] or 1e9 for one in whole)
    assert "gpipe" not in spans and spans["1f1b"] <= 6 * (3 + 9 / 4) + 3 * 3
    assert all(one["peak"] <= 5 for one in cut if one["peak"] is not None)
