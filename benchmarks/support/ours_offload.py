"""Outsize's contenders of the offload benchmark: training or generating, and their plan."""

from __future__ import annotations

import datetime

import torch
from support import streaming
from support.contest import Answer, Task, finish, start

from outsize.api import generate, load
from outsize.checkpoint import hub
from outsize.data import IGNORE, Batch
from outsize.hardware.probe import probe
from outsize.memory.tiers import disk_tier, measured, open_stores
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.plan.text import from_yaml
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind
from outsize.search import PlanRequest, choose
from outsize.serve.files import InFiles
from outsize.simulate import Forecast


def optimizer(task: Task) -> AdamW:
    return AdamW(task.lr, (0.9, 0.999), weight_decay=0.0)


def planned(task: Task) -> Forecast:
    """What the planner chooses within the task's memory, with a disk below it as measured now."""
    spec = disk_tier(task.folder)
    tier = measured(spec, datetime.date.today().isoformat())
    request = PlanRequest(
        task.rows, task.sequence, Precision(), optimizer(task), budget=task.memory,
        documents=(0, task.sequence), tiers=(spec,),
    )  # fmt: skip
    hardware = streaming.with_tiers(probe("cpu"), [tier])
    return choose(hub.read_config(task.weights), request, hardware)


def trained(task: Task) -> Answer:
    """As planned, with weights read tensor by tensor."""
    config, plan = hub.read_config(task.weights), from_yaml(task.plan)
    seconds, losses = [], []
    with open_stores([disk_tier(task.folder)]) as stores:
        model = streaming.shells(config, torch.float32)
        stored = hub.describe(task.weights).fill(torch.float32)
        job = Job(
            NativeFlow(model, plan),
            plan,
            Recipe(optimizer(task)),
            Here(stores=stores),
            fill=lambda name, out: out.copy_(stored(name, out)),
        )
        for step in range(task.steps):
            ids = task.ids(step, config.vocab)
            targets = ids.roll(-1, 1)
            targets[:, -1] = IGNORE
            batch = Batch(ids, targets, ((0, task.sequence),) * task.rows)
            losses.append(float(job.step(batch)))
            seconds.append(job.report.seconds)
    return Answer(seconds, losses)


def generated(task: Task) -> Answer:
    """What `outsize generate --memory` does, asked for token ids."""
    with load(task.weights, memory=task.memory, disk=task.folder) as model:
        prompt = task.ids(0, model.config.vocab)[0].tolist()
        tokens = generate(model, prompt, task.steps + 1)
        assert isinstance(model.home, InFiles) and model.home.session is not None
        seconds = list(model.home.session.seconds[Kind.DECODE])
    return Answer(seconds, [float(token) for token in tokens])


def main() -> None:
    task, path = start()
    finish(trained(task) if task.what == "train" else generated(task), path)


if __name__ == "__main__":
    main()
