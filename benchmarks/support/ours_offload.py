"""Outsize's contenders of the offload benchmark: training or generating."""

from __future__ import annotations

from pathlib import Path

import torch
from support import streaming
from support.contest import Answer, Task, finish, start

from outsize.api import generate
from outsize.checkpoint import hub
from outsize.data import IGNORE, Batch
from outsize.memory.tiers import disk_tier, open_stores
from outsize.optim import AdamW
from outsize.plan import Precision, Rest, Stream
from outsize.runtime import Job, NativeFlow
from outsize.runtime.streamed import Streamed
from outsize.schedule import Kind


def trained(task: Task) -> Answer:
    """Every state on disk, updates behind the backward pass, weights read tensor by tensor."""
    config = hub.read_config(task.weights)
    work = streaming.work_of(task.rows * task.sequence, task.sequence, 1, Precision())
    plan = streaming.plan_of(config, work, Rest("disk", "disk", "disk", "disk"), Stream(parts=8))
    seconds, losses = [], []
    with open_stores([disk_tier(task.folder)]) as stores:
        model = streaming.shells(config, torch.float32)
        stored = hub.describe(task.weights).fill(torch.float32)
        job = Job(
            NativeFlow(model, plan), plan, AdamW(task.lr, (0.9, 0.999), weight_decay=0.0),
            stores=stores, fill=lambda name, out: out.copy_(stored(name, out)),
        )  # fmt: skip
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
    with Streamed(Path(task.weights), task.memory, disk=task.folder) as model:
        prompt = task.ids(0, model.config.vocab)[0].tolist()
        tokens = generate(model, prompt, task.steps + 1)
        assert model.reading is not None
        seconds = list(model.reading.seconds[Kind.DECODE])
    return Answer(seconds, [float(token) for token in tokens])


def main() -> None:
    task, path = start()
    finish(trained(task) if task.what == "train" else generated(task), path)


if __name__ == "__main__":
    main()
