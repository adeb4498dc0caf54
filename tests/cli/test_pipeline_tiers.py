"""`outsize plan` and `outsize train` with a pipeline whose states rest on tiers: the numbers of
one worker, every worker within what is predicted of it, nothing left behind, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from outsize.hardware import Rate, Tier
from outsize.train.metrics import read_metrics

FEW = ("plan.recompute=[block]", "plan.loss_chunk=32", "plan.mlp_tile=32")  # ways to look at
EXACT = tuple(
    word for key in ("precision=float64", "train.save_every=2", *FEW) for word in ("--set", key)
)
FLAT = ("--set", "learning_rate.shape=constant", "--set", "train.evaluate_every=2")
PIPED = ("--mesh", "pipeline=2")
BELOW = ("--memory", "2400KiB", "--disk", "spill:64MiB")


@pytest.fixture(autouse=True)
def known_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure the disk anew in each test takes seconds."""
    (home / "spill").mkdir()
    rate = Rate(1e9, "B/s", "test", "2026-11-22")
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )


def test_plan_predicts_what_rests_below_of_every_worker(home, invoke):
    words = ("plan", "run.yaml", *EXACT, *PIPED)
    made = json.loads(invoke(*words, *BELOW, "--json").stdout)
    assert max(worker["peak"] for worker in made["workers"]) <= 2400 << 10
    assert all(worker["below"]["disk"] > 0 for worker in made["workers"])
    shown = invoke(*words, *BELOW)
    for said in ("on disk", "optimizer states below", "disk update apart", "GB/s"):
        assert said in shown.stdout, said
    missing = invoke(*words, "--memory", "100KiB", "--disk", "spill:64MiB")
    assert missing.exit_code == 2 and missing.stderr.count("\n") == 1
    assert re.search(r"\d+ bytes missing on worker [01]; the smallest plan", missing.stderr)
    assert not list((home / "spill").iterdir())


def numbers(run: Path) -> dict[tuple[int, str], float]:
    names = ("loss", "gradient_norm", "tokens", "validation_loss", "lr")
    return {(r["step"], n): r[n] for r in read_metrics(run) for n in names if n in r}


def test_a_pipeline_with_tiers_gives_the_numbers_of_one_worker_and_others_go_on(home, invoke):
    def train(*words: object) -> None:
        result = invoke("train", *words)
        assert result.exit_code == 0, result.stderr
        assert not list((home / "spill").iterdir()), "nothing is left behind"

    train("run.yaml", *EXACT, *FLAT, "--set", "train.steps=4", "--set", "output=one")
    train("run.yaml", *EXACT, *FLAT, "--set", "train.steps=2", *PIPED, *BELOW)
    plan = yaml.safe_load((home / "run" / "plan.yaml").read_text())
    assert any("disk" in stage.get("rest", {}).values() for stage in plan["stages"])
    train("--resume", "run", *PIPED, "--set", "train.steps=4", "--memory", "2800KiB")
    assert numbers(home / "run") == pytest.approx(numbers(home / "one"), rel=1e-10)
    texts = [(home / run / "sample.txt").read_text() for run in ("run", "one")]
    assert texts[0] == texts[1]

    records = read_metrics(home / "run")
    ends = [r for r in records if "measured_peak_bytes_1" in r]
    assert len(ends) == 2
    for last, budget in zip(ends, (2400 << 10, 2800 << 10), strict=True):
        for worker in range(2):
            peak = last[f"measured_peak_bytes_{worker}"]
            assert peak <= last[f"predicted_peak_bytes_{worker}"] <= min(budget, 1.1 * peak)
    assert all(r["disk_bytes_read"] > 0 for r in records if r["step"] == 2 and "loss" in r)


def test_what_a_tier_is_too_small_for_is_one_line(home, invoke):
    shown = invoke(
        "train", "run.yaml", *EXACT, *PIPED, "--memory", "2400KiB", "--disk", "spill:8KiB"
    )
    assert shown.exit_code == 2 and shown.stderr.count("\n") == 1 and not (home / "run").exists()
    assert re.search(r"too small \(disk 8\.00 KiB\): \d+ bytes missing", shown.stderr)


def test_beside_a_data_axis_optimizer_states_alone_rest_below(home, invoke):
    words = ("plan", "run.yaml", *EXACT, "--mesh", "pipeline=2,data=2", "--disk", "spill:64MiB")
    made = json.loads(invoke(*words, "--memory", "2000KiB", "--json").stdout)
    assert max(worker["peak"] for worker in made["workers"]) <= 2000 << 10
    assert any(worker["below"] for worker in made["workers"])
    shown = invoke(*words, "--memory", "2000KiB").stdout
    assert "optimizer states below" in shown and "parameters below" not in shown
