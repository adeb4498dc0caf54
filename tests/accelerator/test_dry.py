"""benchmarks/gpu.py on the device of the tests, in small: every case of its parts is done."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from outsize.hardware import form
from outsize.hardware.catalogue import catalogue

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
from support.gpu import parts  # noqa: E402
from support.gpu.place import HARDWARE  # noqa: E402


def test_a_dry_run_passes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent))))
    monkeypatch.setattr(parts, "PLANS", {"as picked": {}})
    (tmp_path / HARDWARE).write_text(form.dumps(catalogue("H200")))
    chosen = ("plans", "offloaded", "tokens")
    assert gpu.main(["--dry", "--device", "strict", "--out", str(tmp_path), "--only", *chosen]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    said = {name: each for part in chosen for name, each in found[part]["cases"].items()}
    assert {name: (each["state"], each["why"]) for name, each in said.items()} == {
        name: ("done", "") for name in said
    }
    plan = said["as picked"]["figures"]
    assert plan["foretold"] == pytest.approx(plan["peak"], rel=0.02)
    _, ours, theirs, less = (each["figures"] for each in found["tokens"]["cases"].values())
    assert ours["tokens"] == theirs["tokens"] == less["tokens"]
