"""Workers with a device each under torchrun: `prepare` and `outsize train` give one processor's
numbers, a run on the devices goes on from its checkpoint on one, and two workers on one device are
refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import strict
import torch
from click.testing import CliRunner
from rates import known_hardware
from strict import ORDERS
from strict.autoload import environment
from torch import nn

import outsize
from outsize.cli.main import main
from outsize.errors import OutsizeError
from outsize.hardware.probe import keep

HERE = Path(__file__).parent
KEYS = {
    "model": "tiny", "data": str(Path(json.__file__).parent), "precision": "float64",
    "train.steps": 2, "train.batch_tokens": 256, "train.sequence": 32, "sample.tokens": 0,
    "learning_rate.shape": "constant",
}  # fmt: skip
WORKER = (  # importing torch starts the device
    f"import sys; sys.path.append({str(HERE.parent / 'support')!r}); import torch, test_torchrun;"
    " test_torchrun.work(*sys.argv[1:])"
)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3)
        )
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def prepared(device: str, rows: slice, **options: Any) -> list[float]:
    """Losses of three steps over these of eight rows."""
    torch.manual_seed(0)
    model = Own().double().to(device)
    job = outsize.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), "64KiB", microbatches=2, clip=0.5,
        loss=lambda output, batch: output.square().sum(), count=lambda batch: len(batch), **options
    )  # fmt: skip
    batches = torch.randn(3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = [float(job.step(batch[rows])) for batch in batches]
    job.close()
    return losses


def work(folder: str) -> None:
    """Of a worker that torchrun has started: `prepare`, on one device for all, then on one each;
    then `outsize train`, which ends it."""
    rank = int(os.environ["RANK"])
    shard = slice(4 * rank, 4 * rank + 4)
    with pytest.raises(OutsizeError) as refused:
        prepared("strict", shard, mesh="data=2")
    torch.accelerator.set_device_index(rank)
    losses = prepared("strict", shard, host_memory="1MiB", mesh="data=2", zero=2)
    (Path(folder) / f"{rank}.json").write_text(json.dumps([str(refused.value), losses]))
    main(["train", *_words(folder)])


def _words(folder: str | Path, **more: Any) -> list[str]:
    keys = {**KEYS, "output": f"{folder}/run"} | more
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def _torchrun(folder: Path) -> list[Any]:
    """What `prepare` gave each worker: (a refusal, losses)."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    made = subprocess.run(
        [*run, "--no-python", sys.executable, "-c", WORKER, str(folder)],
        env=environment(*ORDERS[7], devices=2), cwd=HERE, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_two_devices_under_torchrun_and_going_on_with_one() -> None:
    strict.start(*ORDERS[12], devices=2)
    known = known_hardware()  # to measure the device anew in each process takes seconds
    keep(replace(known, devices=(replace(known.devices[0], kind="gpu"),)), "strict")
    with TemporaryDirectory() as name:
        folder, alone = Path(name), Path(name) / "alone"
        found, expected = _torchrun(folder), prepared("cpu", slice(8))
        for refused, losses in found:
            assert refused.startswith(
                "ranks 0 and 1 are on one device, strict:0; expected one each"
            )
            assert losses == pytest.approx(expected, rel=1e-10)
        more = ["--resume", f"{folder}/run", "--workers", "1", "--set", "train.steps=4"]
        got = CliRunner().invoke(main, ["train", *more])
        assert got.exit_code == 0, (got.output, repr(got.exception))
        plain = _words(alone, **{"train.steps": 4, "device": "cpu"})
        assert CliRunner().invoke(main, ["train", *plain]).exit_code == 0
        assert _losses(folder) == pytest.approx(_losses(alone), rel=1e-10)
