"""`outsize train` with a device for each worker: the losses of one processor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from strict import ORDERS
from strict.autoload import environment

CASES = (
    ("data=2", {"plan.zero": 1}),
    ("data=2", {"plan.zero": 3}),
    ("tensor=2", {"plan.overlap": 2}),
    ("tensor=2", {"plan.sequence_parallel": "true"}),
    ("context=2", {}),
    ("pipeline=2", {"plan.pipeline": "1f1b"}),
    ("pipeline=2", {"plan.pipeline": "zb-v"}),
    ("pipeline=2", {"plan.pipeline": "1f1b+vocabulary:1"}),
    ("pipeline=2", {"plan.pipeline": "1f1b+vocabulary:2"}),
)
KEYS = {
    "model": "tiny",
    "data": str(Path(json.__file__).parent),
    "precision": "float64",
    "train.steps": 2,
    "train.batch_tokens": 256,
    "train.sequence": 32,
    "train.evaluate_tokens": 256,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of one processor: training losses, and those of the evaluations."""
    return _losses(tmp_path_factory.mktemp("plain"), (), {}, environment(""))


@pytest.mark.parametrize(
    ("mesh", "keys", "order"),
    [(mesh, keys, ORDERS[place * 2]) for place, (mesh, keys) in enumerate(CASES)],
    ids=lambda x: str(x).replace("plan.", ""),
)
def test_workers_with_devices_give_the_numbers_of_a_processor(mesh, keys, order, plain, tmp_path):
    workers = ("--mesh", mesh, "--workers", "2")
    there = _losses(tmp_path, workers, keys, environment(*order, devices=2))
    assert len(there) == 4
    assert there == pytest.approx(plain, rel=1e-10), (there, plain)


def _losses(
    folder: Path, workers: tuple[str, ...], keys: dict[str, object], variables: dict[str, str]
) -> list[float]:
    said = [("--set", f"{key}={value}") for key, value in (KEYS | keys).items()]
    command = [sys.executable, "-m", "outsize", "train", "--set", f"output={folder}/run", *workers]
    made = subprocess.run(
        [*command, *(text for pair in said for text in pair)],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines for key in ("loss", "validation_loss") if key in line]
