"""Outsize's contender: its Job, with the plan that its planner picks, as `outsize train` makes it.

Every row is one document, so that attention does the same work as a peer's without a mask.
"""

from __future__ import annotations

import torch
from support.contender import IGNORE, Clock, Result, Task, baseline, finish, peak, start
from torch import Tensor

from outsize.checkpoint import hub
from outsize.data import Batch
from outsize.hardware.probe import probe
from outsize.memory import format_bytes
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.search import PlanRequest, choose
from outsize.simulate import Forecast

NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def batch_of(ids_BS: Tensor) -> Batch:
    """Rows with a document each; the last token of a row has no target, as with a peer."""
    targets_BS = torch.full_like(ids_BS, IGNORE)
    targets_BS[:, :-1] = ids_BS[:, 1:]
    return Batch(ids_BS, targets_BS, ((0, ids_BS.shape[1]),) * ids_BS.shape[0])


def job_of(task: Task) -> tuple[Job, Forecast]:
    """The job, its weights loaded, and what was predicted of its plan."""
    rows, sequence = task.steps()[0].shape
    config = hub.read_config(task.weights)
    precision = Precision.named(NAMES[task.precision])
    optimizer = AdamW(task.lr, task.betas, task.eps, task.weight_decay)
    request = PlanRequest(rows, sequence, precision, optimizer, clip=task.clip)
    forecast = choose(config, request, probe("cpu"))
    model = hub.load(task.weights, getattr(torch, precision.master or precision.compute))
    flow = NativeFlow(model, forecast.plan)
    return Job(flow, forecast.plan, Recipe(optimizer, task.clip)), forecast


def describe(forecast: Forecast) -> str:
    """The plan in a line."""
    plan = forecast.plan
    again = sorted({name for stage in plan.stages for name in stage.recompute})
    return (
        f"microbatches of {plan.microbatch_rows} rows, recompute {', '.join(again) or 'nothing'},"
        f" loss in chunks of {plan.loss_chunk or 'all'} tokens,"
        f" feed-forward in tiles of {plan.mlp_tile or 'all'} tokens;"
        f" predicted {format_bytes(forecast.peak)} of tensors and {forecast.seconds:.2f} s a step"
    )


def main() -> None:
    task, path = start()
    steps, base = task.steps(), baseline()
    job, forecast = job_of(task)
    losses, clock = [], Clock()
    for ids_BS in steps:
        losses.append(float(job.step(batch_of(ids_BS))))
        clock.step()
    finish(Result(clock.seconds, losses, peak(), base, describe(forecast)), path)


if __name__ == "__main__":
    main()
