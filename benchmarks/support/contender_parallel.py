"""What every contender of the parallel benchmark is told and answers: a worker that takes steps
when it is told to.

The harness starts all workers of two contenders and lets them step in turns, so that a busy second
hits both. A worker reads lines from its standard input ("step 3", "end") and answers each with a
line of JSON. Imports PyTorch and numpy only, so that a peer's environment needs nothing of Outsize.

B rows of a step, S tokens of a row.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from support.contender import IGNORE, baseline, peak
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """What to train and how it lies on the workers.

    weights: a Hugging Face directory; state: the same as a file of torch.save; config: what its
    config.json says; rows: an .npy of (steps, B, S) token ids. data, tensor: workers of each axis,
    tensor the inner one. shards: degrees over the data axis of parameters, gradients and optimizer
    states. host: of each rank, the name of its machine, where they are made to differ.

    pipeline: workers of that axis, with the other two at 1. schedule: how each side calls it, "" of
    none. microbatches: of a step. cuts: the segments (0 the embedding, then layers, last the head)
    at which the second and further stages begin. gradients: a folder, where every worker leaves the
    gradients of its first step.
    """

    weights: str
    state: str
    config: dict[str, Any]
    rows: str
    threads: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    data: int
    tensor: int
    sequence_parallel: bool
    shards: tuple[int, int, int]
    host: tuple[str, ...] = ()
    pipeline: int = 1
    schedule: str = ""
    microbatches: int = 1
    cuts: tuple[int, ...] = ()
    gradients: str = ""

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline

    def steps(self) -> Tensor:
        """The ids of every step, (steps, B, S) int64."""
        return torch.from_numpy(np.load(self.rows).astype(np.int64))

    def mine(self, ids_BS: Tensor, rank: int) -> Tensor:
        """The rows of a worker."""
        return ids_BS.chunk(self.data)[rank // self.tensor]


def targets_of(ids_BS: Tensor) -> Tensor:
    """The next token of each; the last of a row has none."""
    targets_BS = torch.full_like(ids_BS, IGNORE)
    targets_BS[:, :-1] = ids_BS[:, 1:]
    return targets_BS


@dataclass(frozen=True)
class Answer:
    """What a worker found: bytes resident at the peak and before it (after the imports); bytes that
    it had from others in one step, by operation, where it counts them; bytes of tensors at the
    peak, where it counts them; notes for the reader."""

    peak: int
    base: int
    received: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    notes: str = ""


class Trainer(Protocol):
    """A contender's worker after its start."""

    def step(self, ids_BS: Tensor) -> float:
        """One step on the rows of all workers; gives the mean loss of this worker's rows, or of
        all."""

    def found(self, base: int, peak: int) -> Answer:
        """After the last step."""


def answer(base: int, peak: int) -> Answer:
    """What a peer can say."""
    return Answer(peak, base)


def serve(start: Callable[[Task, int], Trainer]) -> None:
    """Be a worker until the harness says "end" or goes away."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    plain = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    task = Task(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()})
    torch.set_num_threads(task.threads)
    steps, base = task.steps(), baseline()
    trainer = start(task, int(os.environ["RANK"]))

    def say(what: object) -> None:
        print(json.dumps(what), file=out, flush=True)

    say("ready")
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "end":
            say(asdict(trainer.found(base, peak())))
            break
        begin = time.perf_counter()
        loss = trainer.step(steps[int(number)])
        say({"seconds": time.perf_counter() - begin, "loss": loss})
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # a group of gloo that others have left already may not hang the end
