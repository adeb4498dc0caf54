"""What every contender's process shares: its task, its clock, its peak memory, its result.

Imports PyTorch and numpy only, so that a peer's environment needs nothing of Outsize.

B rows of a step, S tokens of a row.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what sets VmHWM back to what is resident now (Linux, proc(5))


@dataclass(frozen=True)
class Task:
    """What to train. rows: an .npy of (steps, B, S) token ids; weights: a Hugging Face directory.

    microbatch_rows: rows that a peer's forward takes at once. compiled: under torch.compile.
    """

    weights: str
    rows: str
    precision: str  # "fp32" or "bf16"
    threads: int
    microbatch_rows: int
    compiled: bool
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float

    def steps(self) -> list[Tensor]:
        """The ids of every step, (B, S) int64 each."""
        return list(torch.from_numpy(np.load(self.rows).astype(np.int64)))


def labels_of(ids_BS: Tensor) -> Tensor:
    """Labels in the Hugging Face convention: the model shifts them, so the first is never used."""
    labels_BS = ids_BS.clone()
    labels_BS[:, 0] = IGNORE
    return labels_BS


@dataclass
class Clock:
    """Seconds from the end of one step to the end of the next, as whoever waits sees them."""

    last: float = field(default_factory=time.perf_counter)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


@dataclass(frozen=True)
class Result:
    """What a process found: by step its seconds and losses; bytes resident at the peak of training
    and before it (after the imports); notes for the reader."""

    seconds: list[float]
    losses: list[float]
    peak: int
    base: int
    notes: str = ""


def start() -> tuple[Task, Path]:
    """The task and where its result goes, from the command line; threads are set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    plain = json.loads(options.task.read_text(encoding="utf-8"))
    task = Task(**{**plain, "betas": tuple(plain["betas"])})
    torch.set_num_threads(task.threads)
    return task, options.result


def finish(result: Result, path: Path) -> None:
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")


def baseline() -> int:
    """Forget the peak of the imports; bytes resident now."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    RESET.write_text(RESET_PEAK, encoding="ascii")
    return peak()


def peak() -> int:
    """Highest resident bytes of this process since `baseline` (VmHWM)."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no VmHWM line; the peak memory cannot be measured here")
