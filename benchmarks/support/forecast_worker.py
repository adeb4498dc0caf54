"""Outsize's worker where steps are predicted: it first measures, then steps, and leaves its traces.

The first worker times the plan's actions alone while the others wait; then 1, 2, ... of them
compute at once, for the pace of each. Everything is left in the task's folder.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from support.contender_parallel import Answer, Task, serve
from support.ours import batch_of
from support.ours_parallel import optimizer_of
from support.ours_pipeline import Worker
from torch import Tensor

from outsize.checkpoint import hub
from outsize.collectives import everyone
from outsize.data import Batch
from outsize.simulate.shared_cores import paces
from outsize.simulate.worker_profile import durations, work
from outsize.trace import write


class Watched:
    """A worker whose steps leave their traces."""

    def __init__(self, task: Task, rank: int) -> None:
        self.worker, self.rank, self.folder = Worker(task, rank), rank, Path(task.weights).parent
        self.steps = 0
        self._measure(task)
        lists = pickle.dumps(self.worker.job.schedule)
        (self.folder / f"schedule-{rank}.pickle").write_bytes(lists)

    def _measure(self, task: Task) -> None:
        """Before the first step, since a run would predict itself then too."""
        worker, config, optimizer = self.worker, hub.read_config(task.weights), optimizer_of(task)
        ids_BS = task.steps()[0]

        def rows(count: int) -> Batch:
            return batch_of(ids_BS[torch.arange(count) % len(ids_BS)])

        wait = everyone(worker.world)
        if self.rank == 0:
            known = durations(worker.plan, config, optimizer, task.clip, rows)
            listed = [[*key, seconds] for key, seconds in known.items()]
            (self.folder / "durations.json").write_text(json.dumps(listed), encoding="utf-8")
        wait.barrier()
        found = paces(worker.world, work(worker.plan, config, optimizer, rows))
        if self.rank == 0:
            (self.folder / "paces.json").write_text(json.dumps(found), encoding="utf-8")

    def step(self, ids_BS: Tensor) -> float:
        loss = self.worker.step(ids_BS)
        write(self.worker.job.report.trace, self.folder / f"trace-{self.steps}-{self.rank}.json")
        self.steps += 1
        return loss

    def found(self, base: int, peak: int) -> Answer:
        return self.worker.found(base, peak)


if __name__ == "__main__":
    serve(Watched)
