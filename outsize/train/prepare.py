"""`prepare`: somebody's own model and loop, two lines, on the same runtime as everything else.

job = outsize.prepare(model, optimizer=torch.optim.AdamW(model.parameters()), memory="2GiB")
loss = job.step(batch)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from outsize.errors import OutsizeError, nearest
from outsize.kernels.entropy import Loss as ByTarget
from outsize.optim import Optimizer
from outsize.plan import Plan
from outsize.plan.settings import PLAN_SETTINGS
from outsize.train.prepared.job import Prepared
from outsize.train.prepared.options import Loss, Options, settings_of
from outsize.train.prepared.workers import refused_alone


def prepare(
    model: nn.Module,
    optimizer: Optimizer | torch.optim.Optimizer | str,
    memory: str | int | None = None,
    *,
    loss: Loss | ByTarget | None = None,
    count: Callable[[Any], float] | None = None,
    blocks: str | Sequence[str] | None = None,
    microbatches: int = 1,
    clip: float | None = None,
    plan: Plan | str | Path | None = None,
    **options: Unpack[Options],
) -> Prepared:
    """Make a model ready to train under a plan; the plan is chosen at the first step, or given.

    model: a native decoder, or any module made of a sequence of blocks; without blocks, as a single
    linear layer or one block that is called again and again, it is computed whole. Caches of keys
    and values (`config.use_cache`) are off until `close`. optimizer: an AdamW, Adam or SGD of
    torch.optim over its parameters (groups, states, and learning rates that a scheduler changes,
    are kept; job.step is its step), "adamw", "muon", "sgd", or one of outsize.optim. memory: bytes
    that the device may hold, as 2**31 or "2GiB"; the plan is made to fit, or refused with what is
    missing, and a step that would hold more raises.

    loss: loss(output, batch) -> mean loss; None takes the output's `loss`, or the output where it
    is a scalar. With microbatches > 1 the batch is cut along its first dimension, and then loss
    must give a sum and count(batch) what to divide it by. A batch (x, y) of a model that takes x
    alone is called with x; loss sees both. Of a native decoder, whose cross-entropy is divided by
    the weights of its targets, loss is instead what is made of each target's cross-entropy
    (outsize.kernels.entropy.Loss), and the batch is a Batch with the columns it reads. blocks: path
    patterns of the blocks; None finds them. clip: largest gradient norm.

    plan: an outsize.Plan or the file of one (`outsize plan --out`), which is taken as it is: it
    says microbatches, recompute, precision, mesh, zero, sequence_parallel and pipeline, and memory
    where none is given. options: what a plan without holes has besides: recompute, precision,
    host_memory, disk, tiers, mesh, zero, sequence_parallel, pipeline, loss_chunk, mlp_tile,
    split_backward, gathered, label_smoothing, z_loss, and the settings of plans that techniques add
    (outsize.train.prepared.options.Options).

    Raises OutsizeError for a model that cannot be split where it must be, naming the module; for a
    plan of another model, of another number of workers or of other batches.
    """
    try:
        for name in options.keys() - {*Options.__annotations__, *PLAN_SETTINGS.names()}:
            known = sorted(
                {*Options.__annotations__, *prepare.__annotations__, *PLAN_SETTINGS.names()}
                - {"options", "return"}
            )
            raise OutsizeError(f"prepare: {name} is no option{nearest(name, known)}")
        settings = settings_of(
            model, plan, memory, loss, count, blocks, microbatches, clip, options
        )
        return Prepared(model, optimizer, settings)
    except OutsizeError as error:
        refused_alone(os.environ, error)
        raise
