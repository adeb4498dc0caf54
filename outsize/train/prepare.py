"""`prepare`: somebody's own model and loop, two lines, on the same runtime as everything else.

job = outsize.prepare(model, optimizer=torch.optim.AdamW(model.parameters()), memory="2GiB")
loss = job.step(batch)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.kernels.entropy import Loss as ByTarget
from outsize.optim import Optimizer
from outsize.plan import Pipelined, Plan
from outsize.train.alike import refused_alone
from outsize.train.asked import Asked, Spreading, settings_of
from outsize.train.prepared import Prepared
from outsize.train.settings import Loss


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
    recompute: Sequence[str] | None = None,
    precision: Literal["float32", "float64", "bfloat16"] | None = None,
    host_memory: str | int | None = None,
    disk: str | None = None,
    tiers: Sequence[str] = (),
    mesh: str | Mesh | None = None,
    zero: int = 1,
    sequence_parallel: bool = False,
    pipeline: str | Pipelined = "1f1b",
    plan: Plan | str | Path | None = None,
) -> Prepared:
    """Make a model ready to train under a plan; the plan is chosen at the first step, or given.

    model: a native decoder, or any module made of a sequence of blocks. optimizer: a
    torch.optim.AdamW or SGD over its parameters (groups, and learning rates that a scheduler
    changes, are kept), "adamw", "muon", "sgd", or one of outsize.optim. memory: bytes that the
    device may hold, as 2**31 or "2GiB"; the plan is made to fit, or refused with what is missing,
    and a step that would hold more raises. loss: loss(output, batch) -> mean loss; None takes the
    output's `loss`, or the output where it is a scalar. With microbatches > 1 the batch is cut
    along its first dimension, and then loss must give a sum and count(batch) what to divide it by.
    A batch (x, y) of a model that takes x alone is called with x; loss sees both.
    Of a native decoder, whose cross-entropy is divided by the weights of its targets, loss is
    instead what is made of each target's cross-entropy (outsize.kernels.entropy.Loss), and the
    batch is a Batch with the columns it reads.
    blocks: path patterns of the blocks; None finds them. clip: largest gradient norm. recompute:
    ("block",) or names of submodules of the blocks; None leaves it to the plan. precision:
    None keeps the model's own dtype, with a float32 master copy where that is bfloat16.

    With memory, states that do not fit rest on tiers: host_memory, RAM beside it, as "4GiB"; disk,
    folders as "DIR[,DIR][:SIZE]"; tiers, memory with a path as "NAME=PATH:SIZE". The model's
    parameters move there at the first step, one chunk at a time, and have no values of their own
    any more: `evaluate` computes with them, `weights` reads them, and the model's own forward is
    refused until they are back on the device. Of several workers sizes are of each; beside a data
    axis optimizer states alone go below, of each worker's own share.

    Under torchrun every worker calls this with its own rows of each batch, as many as the others.
    mesh: "data=2,tensor=2"; by default all workers are on the data axis. zero: which states that
    axis cuts, 0 to 3. Neighbours on the tensor axis pass the same rows. Of an adopted module it
    cuts what automatic rules prove, which `job.spread` tells
    (outsize/parallel/automatic/derive.py), and its random numbers are the first neighbour's; its
    own forward and state_dict are refused from then on. sequence_parallel is for native decoders.
    All begin with the first worker's weights; the loss is the mean over all workers' targets, so
    with a data axis an adopted module needs loss and count.

    On the pipeline axis ("pipeline=2") each worker has some of the blocks; pipeline names the order
    in which microbatches go through, as "1f1b", "zb-h1" or "interleaved:2" (`outsize schedule`);
    "1f1b+vocabulary:2" gives every worker rows of a native decoder's embedding and head.
    Where the stages begin follows from predicted costs; outsize.plan.Pipelined(name, cuts) says it.
    Its workers pass the same rows too. With fewer microbatches than workers some of these wait,
    with one all but one.
    Of an adopted module each one runs the code between the blocks as far as its own need it, on
    what crosses from the others; which that is, is found by running the module on shapes
    (outsize/runtime/adopted/reach.py), so that code must depend on shapes and on the batch alone.
    Dropout draws other numbers than on one worker.

    A module without blocks, as a single linear layer or one block that is called again and again,
    is computed whole. Caches of keys and values (`config.use_cache`) are off until `close`.

    plan: an outsize.Plan or the file of one (`outsize plan --out`), which is taken as it is: it
    says microbatches, recompute, precision, mesh, zero, sequence_parallel and pipeline, and memory
    where none is given. Refused where it is of another model, of another number of workers or of
    other batches.

    Raises OutsizeError for a model that cannot be split where it must be, naming the module.
    """
    asked = Asked(
        memory, loss, count, blocks, microbatches, clip, recompute, precision,
        (host_memory, disk, tuple(tiers)), Spreading(mesh, zero, sequence_parallel, pipeline),
    )  # fmt: skip
    try:
        return Prepared(model, optimizer, settings_of(model, asked, plan))
    except OutsizeError as error:
        refused_alone(os.environ, error)
        raise
