"""`outsize plan` and `outsize train` with a data axis whose workers have shares of states on tiers:
the numbers of one worker, every worker within what is predicted, nothing left behind."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from outsize.hardware import Rate, Tier
from outsize.train.metrics import read_metrics

FEW = ("plan.recompute=[block]", "plan.loss_chunk=32", "plan.mlp_tile=32")  # ways to look at
KEYS = ("precision=float64", "train.save_every=2", "learning_rate.shape=constant", *FEW)
EXACT = tuple(word for key in KEYS for word in ("--set", key))
DISK = ("--disk", "spill:64MiB")
WORKERS = ("--workers", "2", "--mesh", "data=2")


@pytest.fixture(autouse=True)
def known_disk(home, monkeypatch) -> None:
    """To measure the disk anew in each test takes seconds."""
    (home / "spill").mkdir()
    rate = Rate(1e9, "B/s", "test", "2026-11-22")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )


def test_one_worker_s_run_goes_on_within_the_least_budget_of_two_and_back(home, invoke):
    shares = (*WORKERS, *DISK, "--set", "plan.zero=3")

    def train(*words: object) -> None:
        result = invoke("train", *words)
        assert result.exit_code == 0, result.stderr
        assert not list((home / "spill").iterdir()), "nothing is left behind"

    train("run.yaml", *EXACT, "--set", "train.steps=3", "--set", "output=one")
    alone = ("--memory", "2400KiB", *DISK)
    train("run.yaml", *EXACT, *alone, "--set", "train.steps=1")
    assert "parameters: disk" in (home / "run" / "plan.yaml").read_text(), "as one worker may"
    more = (*shares, "--set", "train.steps=2")
    refused = invoke("train", "--resume", "run", *more, "--memory", "100KiB")
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    least = int(re.search(r"the smallest plan needs [^(]*\((\d+) bytes", refused.stderr)[1])
    train("--resume", "run", *more, "--memory", least)
    plan = yaml.safe_load((home / "run" / "plan.yaml").read_text())
    rests = [stage["rest"] for stage in plan["stages"]]
    assert {rest[state] for rest in rests for state in ("optimizer", "gradients")} == {"disk"}
    assert "disk" in {rest["parameters"] for rest in rests}
    train("--resume", "run", "--workers", 1, *alone, "--set", "train.steps=3")

    records, wanted = (read_metrics(home / run) for run in ("run", "one"))
    for name in ("loss", "gradient_norm", "tokens"):
        mine, theirs = ({r["step"]: r[name] for r in rs if name in r} for rs in (records, wanted))
        assert len(mine) == 3 and mine == pytest.approx(theirs, rel=1e-10)
    ends = [r for r in records if "measured_peak_bytes" in r]
    assert len(ends) == 3
    for last, budget in zip(ends, (2400 << 10, least, 2400 << 10), strict=True):
        measured, predicted = last["measured_peak_bytes"], last["predicted_peak_bytes"]
        assert 0.95 * predicted <= measured <= predicted <= budget


def test_plan_predicts_what_rests_below(home, invoke):
    words = ("plan", "run.yaml", *EXACT, "--mesh", "data=2", *DISK, "--memory")
    made = json.loads(invoke(*words, "2700KiB", "--json").stdout)
    assert made["peak"] <= 2700 << 10 and made["below"]["disk"] > 0
    shown = invoke(*words, "2700KiB").stdout
    for said in ("optimizer states below", "disk update apart", "GB/s", "data=2"):
        assert said in shown, said
    assert "parameters below" not in shown and "weights" not in shown.split("hidden from")[1]
