"""What `prepare` was asked, and what is refused of it before anything is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import nn

from outsize.checkpoint.hub import check_here
from outsize.collectives import Mesh, parse_mesh
from outsize.errors import OutsizeError
from outsize.kernels.entropy import Loss as ByTarget
from outsize.memory import parse_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.adopt import find_blocks
from outsize.models.decoder import Decoder
from outsize.parallel.execution import check_adopted
from outsize.plan import Pipelined, Plan, Precision, Sharding
from outsize.plan import zero as stage_of
from outsize.plan.spread import pipelined
from outsize.schedule.pipelines import Costs, Shape, named
from outsize.train.given import plan_given, refuse_missing, refuse_said_twice
from outsize.train.settings import Loss, Settings
from outsize.train.sums import SumOfRows
from outsize.train.tiers import specs_of


class Options(TypedDict, total=False):
    """What `prepare` may be told beside the model and its loss.

    recompute: ("block",) or names of submodules of the blocks; None leaves it to the plan.
    precision: None keeps the model's own dtype, with a float32 master copy where that is bfloat16.

    With memory, states that do not fit rest on tiers: host_memory, RAM beside it, as "4GiB"; disk,
    folders as "DIR[,DIR][:SIZE]"; tiers, memory with a path as "NAME=PATH:SIZE". The model's
    parameters move there at the first step, one chunk at a time, and have no values of their own
    any more: `evaluate` computes with them, `weights` reads them, and the model's own forward is
    refused until they are back on the device. Of several workers sizes are of each; beside a data
    axis optimizer states alone go below, of each worker's own share.

    Under torchrun every worker calls `prepare` with its own rows of each batch, as many as the
    others. mesh: "data=2,tensor=2"; by default all workers are on the data axis. zero: which states
    that axis cuts, 0 to 3. Neighbours on the tensor axis pass the same rows. Of an adopted module
    it cuts what automatic rules prove, which `job.spread` tells
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
    """

    recompute: Sequence[str] | None
    precision: Literal["float32", "float64", "bfloat16"] | None
    host_memory: str | int | None
    disk: str | None
    tiers: Sequence[str]
    mesh: str | Mesh | None
    zero: int
    sequence_parallel: bool
    pipeline: str | Pipelined


@dataclass(frozen=True)
class Asked:
    """How a model is to be trained, as `prepare` has it, and its Options."""

    memory: str | int | None
    loss: Loss | ByTarget | None
    count: Callable[[Any], float] | None
    blocks: str | Sequence[str] | None
    microbatches: int
    clip: float | None
    recompute: Sequence[str] | None = None
    precision: str | None = None
    host_memory: str | int | None = None
    disk: str | None = None
    tiers: Sequence[str] = ()
    mesh: str | Mesh | None = None
    zero: int = 1
    sequence_parallel: bool = False
    pipeline: str | Pipelined = "1f1b"


@dataclass(frozen=True)
class Spread:
    """Over which workers, once it is known."""

    mesh: Mesh
    shards: Sharding
    sequence_parallel: bool
    pipeline: Pipelined


def settings_of(model: nn.Module, asked: Asked, plan: Plan | str | Path | None) -> Settings:
    """What a job is made with. OutsizeError for what cannot be."""
    if not isinstance(model, nn.Module):
        raise OutsizeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, Decoder):
        check_here(model)
    _check_numbers(asked.microbatches, asked.clip)
    given = None if plan is None else plan_given(plan, model)
    if given is not None:
        _refuse_said_twice(asked)
        memory = given.budget if asked.memory is None else asked.memory
        asked = replace(asked, microbatches=given.microbatches, memory=memory)
    spread = _spread(asked, given)
    specs = _tiers(asked, given)
    if not isinstance(model, Decoder):
        check_adopted(spread.mesh, type(model).__name__)
    blocks = () if isinstance(model, Decoder) else _blocks(model, asked.blocks, spread.mesh)
    _check_sums(model, asked, spread.mesh)
    loss, by_target = _losses(model, asked.loss, asked.count)
    _check_spread(model, asked, spread, specs)
    precision = _precision(model, asked.precision) if given is None else given.precision
    return Settings(
        SumOfRows(loss, asked.count) if loss is not None and asked.count is not None else loss,
        asked.count, blocks, asked.microbatches, asked.clip,
        None if asked.recompute is None else tuple(asked.recompute),
        None if asked.memory is None else parse_bytes(asked.memory), precision, specs, spread.mesh,
        spread.shards, spread.sequence_parallel, spread.pipeline, asked.blocks is not None, given,
        by_target,
    )  # fmt: skip


def _refuse_said_twice(asked: Asked) -> None:
    plain = Asked(None, None, None, None, 1, None)
    names = (
        "microbatches", "recompute", "precision", "mesh", "zero", "sequence_parallel", "pipeline",
    )  # fmt: skip
    refuse_said_twice({name: getattr(asked, name) != getattr(plain, name) for name in names})


def _spread(asked: Asked, given: Plan | None) -> Spread:
    if given is not None:
        return Spread(given.mesh, given.shards, given.sequence_parallel, given.pipeline)
    workers, line = workers_of(asked.mesh), asked.pipeline
    line = pipelined(line) if isinstance(line, str) else line
    return Spread(workers, stage_of(asked.zero, workers.data), asked.sequence_parallel, line)


def _tiers(asked: Asked, given: Plan | None) -> tuple[TierSpec, ...]:
    """Below the device, as declared."""
    near = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    specs = specs_of(asked.host_memory, asked.disk, tuple(asked.tiers), near)
    if given is not None:
        refuse_missing(given, specs)
    if specs and asked.memory is None:
        raise OutsizeError(
            f"{specs[0].name!r} is a tier for what does not fit in memory, and memory is None;"
            " expected bytes that the device may hold: pass memory='2GiB'"
        )
    return specs


def _check_sums(model: nn.Module, asked: Asked, workers: Mesh) -> None:
    """Refuse a batch in parts where the loss is a mean, or statistics are those of the batch."""
    parts = max(asked.microbatches, workers.rows)
    if parts == 1:
        return
    if not isinstance(model, Decoder) and (asked.count is None or asked.loss is None):
        many = asked.microbatches > 1
        what = f"microbatches is {asked.microbatches}" if many else f"mesh is {workers}"
        raise OutsizeError(
            f"{what} without loss and count: a mean of means is not the mean; pass"
            " loss=(output, batch) -> sum and count=batch -> number of targets"
        )
    _refuse_batch_statistics(model)


def _check_spread(
    model: nn.Module, asked: Asked, spread: Spread, specs: Sequence[TierSpec]
) -> None:
    """Refuse workers that cannot share this model."""
    _check_pipeline(spread.mesh, spread.pipeline, asked.microbatches, bool(specs))
    _check_vocabulary(spread.mesh, spread.pipeline, model)
    if isinstance(model, Decoder):
        return
    if spread.sequence_parallel:
        raise OutsizeError(
            f"sequence_parallel is for decoders that outsize.load gives, and this is a"
            f" {type(model).__name__}; leave it out"
        )
    if specs and spread.mesh.tensor > 1:
        raise OutsizeError(
            f"mesh is {spread.mesh}, {specs[0].name!r} is a tier and this is a"
            f" {type(model).__name__}; states of what the automatic rules cut stay on the device:"
            " leave out the tiers"
        )


def _check_numbers(microbatches: int, clip: float | None) -> None:
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise OutsizeError(f"microbatches is {microbatches!r}; expected a whole number from 1 on")
    if clip is not None and not clip > 0:
        raise OutsizeError(
            f"clip is {clip}; expected the largest norm that a gradient may have, more than 0, or"
            " None to leave gradients as they are"
        )


def _blocks(
    model: nn.Module, pattern: str | Sequence[str] | None, workers: Mesh
) -> tuple[tuple[str, nn.Module], ...]:
    """The blocks of a module; none where it has none and need not be cut between them."""
    try:
        return tuple(find_blocks(model, pattern))
    except OutsizeError:
        if pattern is not None or workers.pipeline > 1 or workers.tensor > 1:
            raise
        return ()


def _losses(
    model: nn.Module, loss: Loss | ByTarget | None, count: Callable[[Any], float] | None
) -> tuple[Loss | None, ByTarget | None]:
    """The loss of an adopted module's output, or of a native decoder's targets."""
    if not isinstance(model, Decoder):
        if isinstance(loss, ByTarget):
            raise OutsizeError(
                f"loss is a {type(loss).__name__}, made of each target's cross-entropy, which only"
                f" decoders that outsize.load gives have; this is a {type(model).__name__}: pass"
                " loss=(output, batch) -> scalar"
            )
        return loss, None
    if count is not None:
        raise OutsizeError(
            "count is given with a decoder that outsize.load gives, whose losses are divided by the"
            " weights of its targets; leave it out, or pass weights in the batch"
        )
    if loss is not None and not isinstance(loss, ByTarget):
        raise OutsizeError(
            f"loss is a {type(loss).__name__} of (output, batch), and a decoder that outsize.load"
            " gives has no output to take it from: leave it out, or pass an object with `columns`"
            " and `of` (outsize.kernels.entropy.Loss)"
        )
    return None, loss


def workers_of(mesh: str | Mesh | None) -> Mesh:
    """The mesh of this run: as given, or all workers that torchrun has started on the data axis."""
    if mesh is None:
        return Mesh(data=int(os.environ.get("WORLD_SIZE", "1")))
    return parse_mesh(mesh) if isinstance(mesh, str) else mesh


def _check_pipeline(mesh: Mesh, order: Pipelined, microbatches: int, tiers: bool) -> None:
    """Refuse a pipeline that cannot be."""
    if mesh.pipeline == 1:
        return
    named(order.schedule, Shape(mesh.pipeline, microbatches, Costs(*order.costs)))
    if tiers:
        raise OutsizeError(
            f"mesh is {mesh} and states may rest on tiers; workers of a pipeline have a part of the"
            " model each instead: leave out host_memory, disk and tiers"
        )


def _check_vocabulary(mesh: Mesh, order: Pipelined, model: nn.Module) -> None:
    """Refuse a vocabulary that nobody can cut."""
    if not order.vocabulary:
        return
    if mesh.pipeline == 1:
        raise OutsizeError(
            f"pipeline is {order.said!r} and mesh.pipeline is 1: a vocabulary is cut over the"
            f" workers of a pipeline; pass pipeline={order.schedule!r}, or a mesh with a pipeline"
        )
    if not isinstance(model, Decoder):
        raise OutsizeError(
            f"pipeline is {order.said!r} and this is a {type(model).__name__}, whose vocabulary is"
            " not known; cut it of decoders that outsize.load gives, or pass"
            f" pipeline={order.schedule!r}"
        )


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise OutsizeError(
                f"module {name!r} is a {type(module).__name__}: its statistics are those of the"
                " whole batch, which microbatches would change; use microbatches=1"
            )


def _precision(model: nn.Module, name: str | None) -> Precision:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if name is None and len(dtypes) > 1:
        raise OutsizeError(
            f"model holds parameters of {', '.join(sorted(map(str, dtypes)))}; expected one dtype:"
            " convert it with model.to(dtype), or pass precision="
        )
    return Precision.named(name or str(dtypes.pop()).removeprefix("torch."))
