"""What the processes of benchmarks/finetune.py share: the task, rows with labels, the figures.

Imports PyTorch and numpy only, so that a peer's environment needs nothing of Outsize.

B rows of a step, S tokens of a row.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
TASK, FOUND = "task.json", "found.json"


@dataclass(frozen=True)
class Task:
    """What to train, in files of one folder. weights, adapter: directories as Hugging Face and peft
    have them; rows: an .npz of `ids` and `labels` (steps, B, S), labels as the models shift them.

    precision: fp32, or bf16 (autocast). nf4: the base in bitsandbytes' NF4, scales quantised too.
    """

    weights: str
    adapter: str
    rows: str
    precision: str
    nf4: bool
    threads: int
    rank: int
    lr: float
    clip: float

    def steps(self) -> list[tuple[Tensor, Tensor]]:
        """ids_BS and labels_BS, int64, of every step."""
        with np.load(self.rows) as found:
            ids, labels = found["ids"].astype(np.int64), found["labels"].astype(np.int64)
        return list(zip(torch.from_numpy(ids), torch.from_numpy(labels), strict=True))


@dataclass
class Found:
    """By step its seconds, from the end of the one before, and its loss."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.perf_counter)

    def step(self, loss: float | None = None) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        if loss is not None:
            self.losses.append(loss)

    def write(self, folder: Path) -> None:
        (folder / FOUND).write_text(json.dumps(asdict(self)), encoding="utf-8")


def start() -> tuple[Task, Path]:
    """The task in the folder that the command line names; threads are set."""
    folder = Path(sys.argv[1])
    task = Task(**json.loads((folder / TASK).read_text(encoding="utf-8")))
    torch.set_num_threads(task.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return task, folder
