"""`outsize plan --workers`: memory of a worker, bytes between workers, refusals."""

from __future__ import annotations

import json
import re

import pytest

from outsize.train.metrics import read_metrics


def planned(invoke, *words: object) -> dict:
    shown = invoke("plan", "run.yaml", "--set", "precision=float32", *words, "--json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def test_plan_predicts_what_a_worker_holds_and_hears(home, invoke):
    alone = planned(invoke)
    assert alone["received"] == {}
    numel = alone["static"]["parameters"] // 4
    for stage, sent in {1: 2, 2: 2, 3: 3}.items():
        made = planned(invoke, "--workers", 2, "--set", f"plan.zero={stage}")
        held = made["static"]
        assert held["optimizer"] == pytest.approx(8 * numel / 2, rel=1e-3)
        assert held["gradients"] == pytest.approx(4 * numel / (2 if stage > 1 else 1), rel=1e-3)
        assert held["parameters"] == pytest.approx(4 * numel / (2 if stage > 2 else 1), rel=1e-3)
        assert all(part["other_machines"] == 0 for part in made["received"].values())
        heard = sum(part["this_machine"] for part in made["received"].values())
        assert heard <= sent * 4 * numel / 2 * (1 + 1e-9)
        assert heard > 0.6 * sent * 4 * numel / 2
    both = planned(invoke, "--mesh", "data=2,tensor=2")
    assert {"reduce", "collect", "tensor"} <= both["received"].keys()
    assert both["static"]["parameters"] < 0.7 * alone["static"]["parameters"]


def test_three_numbers_say_what_is_cut_over_how_many(home, invoke):
    named = planned(invoke, "--workers", 2, "--set", "plan.zero=2")
    said = planned(invoke, "--workers", 2, "--set", "plan.zero=[1, 2, 2]")
    assert said["static"] == named["static"] and said["received"] == named["received"]
    other = planned(invoke, "--workers", 2, "--set", "plan.zero=[2, 2, 2]")
    assert other["static"]["parameters"] < named["static"]["parameters"]


def test_plan_prints_workers_shards_and_bytes(home, invoke):
    shown = invoke("plan", "run.yaml", "--mesh", "data=2,tensor=2")
    assert shown.exit_code == 0, shown.stderr
    for said in (
        "data=2,tensor=2; each takes 2 rows", "1, 1, 2", "from others", "gradients, summed",
        "parameters of a worker; peak memory", "free here for each worker",
    ):  # fmt: skip
        assert said in shown.stdout, said
    plain = invoke("plan", "run.yaml").stdout
    assert "from others" not in plain and "workers" not in plain


def test_a_budget_makes_workers_cut_more(home, invoke):
    peak = planned(invoke, "--workers", 2, "--set", "plan.zero=1")["peak"]
    refused = invoke(
        "plan", "run.yaml", "--set", "precision=float32", "--workers", 2, "--memory", "20KiB"
    )
    assert refused.exit_code == 2
    named = re.search(r"needs [^(]*\((\d+) bytes", refused.stderr)
    assert named is not None, refused.stderr
    least = int(named[1])
    assert least < 0.7 * peak
    made = planned(invoke, "--workers", 2, "--memory", least)
    assert made["peak"] <= least


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--workers", 4, "--mesh", "data=3"), "expected for instance data=4"),
        (("--mesh", "tensor=3"), "3"),
        (("--workers", 2, "--memory", "20KiB"), "bytes missing"),
        (
            ("--workers", 2, "--set", "plan.zero=4"),
            "plan.zero: 4; expected at least 0 and at most 3",
        ),
        (("--workers", 2, "--set", "plan.zero=[1, 2]"), "plan.zero is [1, 2]; expected 0 to 3, or"),
        (("--workers", 2, "--set", "plan.zero=[0, 1, 2]"), "plan.zero is [0, 1, 2]; expected"),
        (
            ("--workers", 2, "--set", "plan.zero=[1, 3, 3]"),
            "mesh.data is 2; expected a multiple of 3",
        ),
        (("--workers", 2, "--set", "plan.zero=most"), "plan.zero: 'most'; expected a whole"),
    ],
)
def test_what_workers_cannot_do_is_one_line(words, expected, home, invoke):
    shown = invoke("plan", "run.yaml", *words)
    assert shown.exit_code == 2
    assert shown.stderr.count("\n") == 1 and expected in shown.stderr


@pytest.mark.parametrize("words", [("--workers", 2), ("--mesh", "tensor=2")])
def test_a_run_hears_what_the_plan_predicted(words, home, invoke):
    made = planned(invoke, *words)
    heard = sum(part["this_machine"] for part in made["received"].values())
    assert invoke("train", "run.yaml", *words).exit_code == 0
    steps = [r["workers_bytes_read"] for r in read_metrics(home / "run") if "loss" in r]
    assert steps[1] == pytest.approx(heard, rel=0.02)  # rows hold documents of any lengths
