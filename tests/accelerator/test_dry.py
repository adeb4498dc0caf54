"""benchmarks/gpu.py on the device of the tests, in small: each case of two parts is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outsize.hardware import form
from outsize.hardware.named import catalogue

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A process of its own, since cases are forked from a server that has imported what they need.
ONE_PLAN = """
import sys
import gpu
from support.gpu import parts
parts.PLANS = {"as picked": {}}
sys.exit(gpu.main(sys.argv[1:]))
"""


def test_a_dry_run_passes(built: Path, tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text(form.dumps(catalogue("H200")))
    chosen = ("plans", "tokens")
    options = ("--dry", "--device", "strict", "--out", str(tmp_path), "--only", *chosen)
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent))),
        "STRICT_CACHE": str(built.parents[1]),
    }
    command = [sys.executable, "-c", ONE_PLAN, *options]
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    said = [each for part in chosen for each in found[part]["cases"].values()]
    assert len(said) == 7
    assert [(each["state"], each["why"]) for each in said] == [("done", "")] * 7
    plan, _, ours, theirs, _, _, less = (each["figures"] for each in said)
    assert plan["foretold"] == pytest.approx(plan["peak"], rel=0.02)
    assert ours["tokens"] == theirs["tokens"] == less["tokens"]
