"""`outsize train --mesh context=2`: the numbers of one worker, gone on with on other meshes."""

from __future__ import annotations

import pytest

from outsize.train.metrics import read_metrics

EXACT = (
    "--set",
    "precision=float64",
    "--set",
    "train.dropout=0.1",
    "--set",
    "schedule.shape=constant",
)


def test_a_run_changes_its_mesh(home, invoke) -> None:
    def train(*words: object) -> None:
        result = invoke("train", *words)
        assert result.exit_code == 0, result.stderr

    train("run.yaml", *EXACT, "--set", "output=one")
    begun = ("--set", "train.steps=1", "--set", "output=two", "--mesh", "context=2")
    train("run.yaml", *EXACT, *begun)
    train("--resume", "two", "--set", "train.steps=2", "--workers", 1)
    train("--resume", "two", "--set", "train.steps=3", "--mesh", "data=2,context=2")
    wanted, found = (
        [r for r in read_metrics(home / name) if "loss" in r] for name in ("one", "two")
    )
    assert [r["step"] for r in found] == [1, 2, 3]
    for mine, theirs in zip(found, wanted, strict=True):
        for key in ("loss", "gradient_norm", "lr", "tokens"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-10)


def test_rows_that_are_too_short_are_refused(home, invoke) -> None:
    shown = invoke("train", "run.yaml", "--mesh", "context=33", "--set", "train.sequence=64")
    assert shown.exit_code != 0 and shown.stderr.count("\n") == 1
    assert "fewer than two tokens for each worker" in shown.stderr
