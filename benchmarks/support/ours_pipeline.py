"""Outsize's worker in the pipeline benchmark: its Job over the world that its launcher would make,
one stage of the plan a segment, nothing computed again, the loss in chunks as planned elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support.contender_parallel import Answer, Task, serve
from support.ours import batch_of
from support.ours_parallel import optimizer_of
from torch import Tensor

from outsize.checkpoint import hub
from outsize.collectives import Mesh, join, meeting
from outsize.models.build import shells
from outsize.models.names import layout
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.train.first_values import hub_fill

SUFFIX = ".exp_avg"


def plan_of(task: Task, loss_chunk: int = 0) -> Plan:
    """The step as the contest wants it."""
    _, rows, sequence = task.steps().shape
    segments = task.config["num_hidden_layers"] + 2
    return Plan(
        segments, per_segment(segments), rows=rows, microbatch_rows=rows // task.microbatches,
        sequence=sequence, loss_chunk=loss_chunk, mesh=Mesh(pipeline=task.pipeline),
        pipeline=Pipelined(task.schedule, task.cuts),
    )  # fmt: skip


class Worker:
    def __init__(self, task: Task, rank: int) -> None:
        config = hub.read_config(task.weights)
        self.task, self.rank, self.plan = task, rank, plan_of(task)
        self.world = join(self.plan.mesh, rank, meeting(os.environ))
        model = shells(config, torch.float32, "cpu")
        self.job = Job(
            NativeFlow(model, self.plan),
            self.plan,
            Recipe(optimizer_of(task), task.clip),
            Here(self.world),
            fill=hub_fill(Path(task.weights), config),
        )
        self.steps = 0

    def step(self, ids_BS: Tensor) -> float:
        loss = float(self.job.step(batch_of(ids_BS)))
        if not self.steps and self.task.gradients:
            self._leave()
        self.steps += 1
        return loss

    def _leave(self) -> None:
        """The clipped gradients of the first step, of which AdamW's first moment was made."""
        beta, moments = self.task.betas[0], dict[str, Tensor]()
        for name, state in self.job.optimizer_state():
            if name.endswith(SUFFIX):
                moments[name.removesuffix(SUFFIX)] = state / (1 - beta)
        found = {
            theirs: tensor
            for entry in layout(hub.read_config(self.task.weights))
            for theirs, tensor in zip(
                entry.theirs, entry.merge(tuple(moments[n] for n in entry.ours)), strict=True
            )
        }
        if self.rank == 0:
            torch.save(found, Path(self.task.gradients, "ours-0.pt"))

    def found(self, base: int, peak: int) -> Answer:
        self.world.close()
        return Answer(peak, base)


if __name__ == "__main__":
    serve(Worker)
