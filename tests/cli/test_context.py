"""`outsize train --mesh context=2`; that runs go on with and from it: tests/cli/test_expert.py."""

from __future__ import annotations


def test_rows_that_are_too_short_are_refused(home, invoke) -> None:
    shown = invoke("train", "run.yaml", "--mesh", "context=3", "--set", "train.sequence=4")
    assert shown.exit_code != 0 and shown.stderr.count("\n") == 1
    assert "fewer than two tokens for each worker" in shown.stderr
