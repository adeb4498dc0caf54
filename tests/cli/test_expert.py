"""`outsize train --mesh expert=2`: the numbers of one worker, gone on with on other meshes."""

from __future__ import annotations

import json

import pytest

from outsize.train.metrics import read_metrics

EXACT = ("--set", "model.name=tiny-experts", "--set", "precision=float64")
SAME = ("--set", "train.dropout=0.1", "--set", "schedule.shape=constant")


@pytest.fixture
def said(home, invoke):
    """said(*words): run `outsize *words`; gives what it prints."""

    def run(*words: object) -> str:
        result = invoke(*words)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return run


def test_a_run_changes_its_mesh(home, said) -> None:
    """Experts over workers, then sequences, then one worker: each goes on with what the one before
    has saved."""
    said("train", "run.yaml", *EXACT, *SAME, "--set", "output=one")
    begun = ("--set", "train.steps=1", "--set", "output=two", "--mesh", "expert=2")
    said("train", "run.yaml", *EXACT, *SAME, *begun)
    said("train", "--resume", "two", "--set", "train.steps=2", "--mesh", "context=2")
    said("train", "--resume", "two", "--set", "train.steps=3", "--workers", 1)
    wanted, found = (
        [r for r in read_metrics(home / name) if "loss" in r] for name in ("one", "two")
    )
    assert [r["step"] for r in found] == [1, 2, 3]
    for mine, theirs in zip(found, wanted, strict=True):
        for key in ("loss", "gradient_norm", "lr", "tokens"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-10)


def test_what_crosses_is_foretold(home, said) -> None:
    """Of an even router, half of the rows that tokens make: to their experts and back, and their
    gradients; before, how many for each of the four experts of a worker."""
    made = json.loads(said("plan", "run.yaml", *EXACT, "--mesh", "expert=2", "--json"))
    layers, rows, hidden = 2, 2 * (256 // 2) // 2, 64
    wanted = layers * (4 * rows * hidden * 8 + 4 * 8)
    assert made["received"]["expert"]["this_machine"] == wanted


def test_a_model_without_experts_is_refused(home, invoke) -> None:
    shown = invoke("train", "run.yaml", "--mesh", "expert=2")
    assert shown.exit_code == 2 and shown.stderr.count("\n") == 1
    assert "the model has no experts; set expert to 1" in shown.stderr
