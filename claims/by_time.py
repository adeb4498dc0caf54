"""What the claims that judge pipelines by time share: a network of convolutions with batch
normalisation, a transformer, and two workers, as torchrun starts them, that make steps of them.

A claim's script is its own worker: `run(__file__)` starts two of it, which call `tell`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outsize

WORKERS, ROWS, CLASSES, TOKENS, VOCABULARY = 2, 64, 10, 32, 512
STEPS, WARM = 7, 2
NAMED = ("microbatch-statistics",)
TOLD = "OUTSIZE_CLAIM_TOLD"  # where the first worker writes
Batch = tuple[Tensor, Tensor]


class Convolutions(nn.Module):
    """Blocks with batch normalisation, every three half as long and twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16 * 2 ** (i // 3) for i in range(9)]
        pairs = list(zip([16, *widths], widths, strict=False))
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=1 if a == b else 2, padding=1), nn.BatchNorm2d(b),
                nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
            )
            for a, b in pairs
        )  # fmt: skip
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3, 32, 32) to logits of classes."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Transformer(nn.Module):
    """Layers of PyTorch's encoder, as wide everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            for _ in range(8)
        )
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """(rows, tokens) to logits of each token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def subjects() -> dict[str, tuple[Callable[[], nn.Module], Batch]]:
    """By name: what makes a model, and a batch."""
    torch.manual_seed(0)
    images = torch.randn(ROWS, 3, 32, 32), torch.randint(CLASSES, (ROWS,))
    ids = torch.randint(VOCABULARY, (2, ROWS, TOKENS))
    return {
        "convolutions": (Convolutions, images),
        "transformer": (Transformer, (ids[0], ids[1])),
    }


def loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum")


def count(batch: Batch) -> float:
    return float(batch[1].numel())


def seconds(name: str, microbatches: int, **options: Any) -> float:
    """Of a step of a subject on the pipeline, the median."""
    torch.manual_seed(0)
    made, batch = subjects()[name]
    model = made()
    if microbatches > 1 and name == "convolutions":
        options["approximate"] = NAMED
    job = outsize.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), loss=loss, count=count,
        microbatches=microbatches, mesh=f"pipeline={WORKERS}", **options,
    )  # fmt: skip
    took = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        job.step(batch)
        took.append(time.perf_counter() - begin)
    job.close()
    return median(took[WARM:])


def least(ways: Mapping[str, Sequence[Mapping[str, Any]]], turns: int) -> dict[str, list[float]]:
    """By subject the least seconds of a step each way, of so many turns. ways: options of
    `seconds`, by subject."""
    found = {name: [float("inf")] * len(each) for name, each in ways.items()}
    for _ in range(turns):
        for name, best in found.items():
            best[:] = [min(x, seconds(name, **w)) for x, w in zip(best, ways[name], strict=True)]
    return found


def run(script: str) -> Any:
    """Start two workers of a script; gives what the first tells."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        words = ("-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", script)
        environment = {**os.environ, TOLD: str(told), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(told.read_text())


def is_worker() -> bool:
    return TOLD in os.environ


def tell(what: Any) -> None:
    """From the first worker to who has started it."""
    if os.environ["RANK"] == "0":
        Path(os.environ[TOLD]).write_text(json.dumps(what))
