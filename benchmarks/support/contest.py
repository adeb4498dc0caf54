"""What every contender of the offload benchmark is told and answers.

Imports PyTorch and the standard library only, so that a peer's environment needs nothing of
Outsize.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Task:
    """what: "train" or "generate". weights: a Hugging Face directory, float32. folder: where states
    may lie. memory: bytes that Outsize may plan with. steps of `rows` rows of
    `sequence` tokens, or so many new tokens. plan: what Outsize's planner made of it, YAML."""

    what: str
    weights: str
    folder: str
    memory: int
    steps: int
    rows: int
    sequence: int
    threads: int
    lr: float = 1e-5
    plan: str = ""

    def ids(self, step: int, vocabulary: int) -> Tensor:
        """(rows, sequence) int64: random, the same for everybody."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.rows, self.sequence)
        return torch.randint(0, vocabulary, shape, generator=generator)


@dataclass(frozen=True)
class Answer:
    """seconds of each step or token; what came out: losses, or tokens; most resident bytes of the
    process."""

    seconds: list[float]
    outcome: list[float]
    resident: int = field(default=0)


def start() -> tuple[Task, Path]:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path)
    parser.add_argument("answer", type=Path)
    options = parser.parse_args()
    task = Task(**json.loads(options.task.read_text(encoding="utf-8")))
    torch.set_num_threads(task.threads)
    return task, options.answer


def finish(answer: Answer, path: Path) -> None:
    full = Answer(answer.seconds, answer.outcome, resident())
    path.write_text(json.dumps(asdict(full)), encoding="utf-8")


def resident() -> int:
    """Most bytes resident in this process so far (VmHWM)."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no VmHWM line")
