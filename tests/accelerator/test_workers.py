"""`outsize train` with a device for each worker: the losses of one processor."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import strict
from click.testing import CliRunner
from rates import known_machine

from outsize.cli.main import main
from outsize.hardware.probe import keep

CASES = (
    ("data=2,context=2", {"plan.zero": 3}),
    ("data=2,tensor=2", {"plan.zero": 1, "plan.overlap": 2, "plan.sequence_parallel": "true"}),
    ("pipeline=2", {"plan.pipeline": "zb-v+vocabulary:2"}),
)
KEYS = {
    "model": "tiny",
    "data": str(Path(json.__file__).parent),
    "precision": "float64",
    "train.steps": 2,
    "train.batch_tokens": 256,
    "train.sequence": 32,
    "train.evaluate_tokens": 256,
    "sample.tokens": 0,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of one processor: training losses, and those of the evaluations."""
    return _losses(tmp_path_factory.mktemp("plain"), (), {"device": "cpu"})


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("mesh", "keys", "order"),
    [(mesh, keys, strict.ORDERS[place * 2]) for place, (mesh, keys) in enumerate(CASES)],
    ids=lambda x: str(x).replace("plan.", ""),
)
def test_workers_with_devices_give_the_numbers_of_a_processor(mesh, keys, order, plain, tmp_path):
    count = math.prod(int(each.partition("=")[2]) for each in mesh.split(","))
    workers = ("--mesh", mesh, "--workers", str(count))
    strict.start(*order, devices=count)
    machine = known_machine()
    keep(replace(machine, devices=(replace(machine.devices[0], kind="gpu", grain=512),)), "auto")
    there = _losses(tmp_path, workers, keys)
    assert len(there) == 4
    assert there == pytest.approx(plain, rel=1e-10), (there, plain)


def _losses(folder: Path, workers: tuple[str, ...], keys: dict[str, object]) -> list[float]:
    """Workers are forked from this process."""
    said = [f"{key}={value}" for key, value in (KEYS | keys | {"output": folder / "run"}).items()]
    command = ["train", *workers, *(word for each in said for word in ("--set", each))]
    made = CliRunner().invoke(main, command)
    assert made.exit_code == 0, made.output[-2000:] + str(made.exception)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines for key in ("loss", "validation_loss") if key in line]
