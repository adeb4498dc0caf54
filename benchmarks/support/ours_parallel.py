"""Outsize's worker in the parallel benchmark: its Job over the world that its launcher would make,
under the plan that its planner picks for the mesh and the shards, as `outsize train` does it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support.contender_parallel import Answer, Task, serve
from support.ours import batch_of
from torch import Tensor

from outsize.checkpoint import hub
from outsize.collectives import Mesh, along, join, meeting, received
from outsize.hardware.probe import probe
from outsize.models.build import shells
from outsize.models.config import DecoderConfig
from outsize.optim import AdamW
from outsize.parallel.tensor.decoder import split
from outsize.plan import Plan, Precision, Sharding
from outsize.plan.text import from_yaml, to_yaml
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, choose
from outsize.train.first_values import hub_fill


def optimizer_of(task: Task) -> AdamW:
    return AdamW(task.lr, task.betas, task.eps, task.weight_decay)


def planned(task: Task, config: DecoderConfig) -> tuple[Plan, int]:
    """The plan, and the bytes of tensors that it is predicted to hold on a worker."""
    rows, sequence = task.steps().shape[1:]
    request = PlanRequest(
        rows, sequence, Precision.named("float32"), optimizer_of(task), clip=task.clip,
        documents=(0, sequence), mesh=Mesh(task.data, task.tensor),
        shards=Sharding(*task.shards), sequence_parallel=task.sequence_parallel,
    )  # fmt: skip
    found = choose(config, request, probe("cpu"))
    return found.plan, found.peak


class Worker:
    def __init__(self, task: Task, rank: int) -> None:
        config, store = hub.read_config(task.weights), meeting(os.environ)
        host = task.host[rank] if task.host else ""
        self.world = join(Mesh(task.data, task.tensor), rank, store, host=host)
        self.tensors = 0
        if rank == 0:
            plan, self.tensors = planned(task, config)
            store.set("plan", to_yaml(plan))
        self.plan = from_yaml(store.get("plan").decode())
        model = shells(config, torch.float32, "cpu")
        cuts = split(model, along(self.world, "tensor"), task.sequence_parallel)
        self.job = Job(
            NativeFlow(model, self.plan),
            self.plan,
            Recipe(optimizer_of(task), task.clip),
            Here(self.world),
            cuts=cuts,
            fill=hub_fill(Path(task.weights), config),
        )
        self.before: dict[str, int] = {}

    def step(self, ids_BS: Tensor) -> float:
        self.before = dict(received(self.world))
        mine_BS = ids_BS[slice(*self.plan.rows_at(self.job.place))]
        return float(self.job.step(batch_of(mine_BS)))

    def found(self, base: int, peak: int) -> Answer:
        now = received(self.world)
        had = {name: count - self.before.get(name, 0) for name, count in now.items()}
        self.world.close()
        return Answer(peak, base, had, self.tensors, self.plan_note())

    def plan_note(self) -> str:
        plan = self.plan
        again = {name for stage in plan.stages for name in stage.recompute}
        return (
            f"microbatches of {plan.microbatch_rows} rows, recompute"
            f" {', '.join(sorted(again)) or 'nothing'},"
            f" loss in chunks of {plan.loss_chunk or 'all'} tokens"
        )


if __name__ == "__main__":
    serve(Worker)
