"""`outsize plan` with tiers: what rests where, what techniques save, the thresholds, refusals."""

from __future__ import annotations

import json
import re


def test_plan_prints_tiers_ladder_and_thresholds(home, invoke):
    plain = json.loads(invoke("plan", "run.yaml", "--json").stdout)
    (home / "spill").mkdir()
    budget = int(0.5 * plain["peak"])
    words = ("plan", "run.yaml", "--memory", budget, "--disk", "spill:1GiB")
    shown = invoke(*words)
    assert shown.exit_code == 0, shown.output
    for said in (
        "techniques", "everything on the device", "optimizer states below", "hidden from",
        "disk update apart", "of staging beside the budget", "GB/s",
    ):  # fmt: skip
        assert said in shown.stdout, said
    made = json.loads(invoke(*words, "--json").stdout)
    assert made["peak"] <= budget < plain["peak"] and made["below"]["disk"] > 0
    assert not list((home / "spill").iterdir()), "nothing is left behind"


def test_plan_refuses_what_cannot_work_in_one_line(home, invoke):
    (home / "spill").mkdir()
    shown = invoke("plan", "run.yaml", "--memory", "20KiB", "--disk", "spill:1GiB")
    assert shown.exit_code != 0
    lines = shown.stderr.strip().splitlines()
    assert len(lines) == 1 and re.search(r"\d+ bytes missing", lines[0])
    assert "set memory to" in lines[0]


def test_plan_of_a_technique_that_keeps_its_states_on_the_device(home, invoke):
    """It is printed as a whole, with what the technique can save."""
    words = ("--disk", ".:1GiB", "--set", "plan.approximate=[frozen-by-dynamics]")
    shown = invoke("plan", "run.yaml", *words)
    assert shown.exit_code == 0 and shown.stderr == "", shown.stderr
    assert "everything on the device" in shown.stdout and "hidden from" in shown.stdout
    assert "states below" not in shown.stdout
