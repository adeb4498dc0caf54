"""What `prepare` is told, and what is refused of it before anything is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import Tensor, nn

from outsize.checkpoint.hub import check_here
from outsize.collectives import Mesh, parse_mesh
from outsize.data import Batch
from outsize.errors import OutsizeError, counted
from outsize.kernels.entropy import Loss as ByTarget
from outsize.memory import parse_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.adopt import find_blocks
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.parallel.execution import check_adopted
from outsize.plan import Pipelined, Plan, Precision, Sharding
from outsize.plan import zero as stage_of
from outsize.plan.file import PlanFile, digest_of, read_plan
from outsize.plan.spread import pipelined
from outsize.schedule.pipelines import Costs, Shape, named
from outsize.search import PlanRequest
from outsize.train.prepared.batches import rows_in
from outsize.train.prepared.loss_sums import SumOfRows
from outsize.train.tiers import check_tiers, specs_of

Loss = Callable[[Any, Any], Tensor]


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


# What they are where nobody says them.
PLAIN: Options = {
    "recompute": None, "precision": None, "host_memory": None, "disk": None, "tiers": (),
    "mesh": None, "zero": 1, "sequence_parallel": False, "pipeline": "1f1b",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What `prepare` was told, read. named: the blocks are the user's, not found. plan: the user's,
    whose batches and memory are these; by_target: the loss of a native decoder."""

    loss: Loss | None
    by_target: ByTarget | None
    count: Callable[[Any], float] | None
    blocks: tuple[tuple[str, nn.Module], ...]
    named: bool
    microbatches: int
    clip: float | None
    recompute: tuple[str, ...] | None
    budget: int | None
    precision: Precision
    tiers: tuple[TierSpec, ...]
    mesh: Mesh
    shards: Sharding
    sequence_parallel: bool
    pipeline: Pipelined
    plan: Plan | None

    @property
    def whole(self) -> bool:
        """Whether the module may be computed without cutting it into blocks."""
        return bool(self.blocks) and not (self.named or self.parted or self.tiers or self.plan)

    @property
    def parted(self) -> bool:
        """Whether a worker has parts of the model alone."""
        return self.mesh.tensor > 1 or self.mesh.pipeline > 1

    def request(self, optimizer: Optimizer, batch: Any) -> PlanRequest:
        """What is asked of the planner for a batch of this worker. An optimizer that changes the
        maths was asked for by name."""
        native, rows = isinstance(batch, Batch), rows_in(batch)
        return PlanRequest(
            rows * self.mesh.rows,
            batch.ids_BS.shape[1] if native else 0,
            self.precision,
            optimizer,
            self.clip,
            self.budget,
            -(-rows // self.microbatches),
            self.recompute,
            None if native else 0,
            approximate=() if optimizer.approximate is None else (optimizer.approximate,),
            tiers=self.tiers,
            mesh=self.mesh,
            shards=self.shards,
            sequence_parallel=self.sequence_parallel,
            pipeline=self.pipeline,
            tiled=native,
            few=True,
        )

    def given_plan(self, request: PlanRequest, segments: int) -> Plan | None:
        """The user's plan, if there is one. OutsizeError where it is for other batches, or for a
        model cut otherwise."""
        plan = self.plan
        if plan is None:
            return None
        if plan.segments != segments:
            raise OutsizeError(
                f"plan is of {plan.segments} segments, and this model has {segments}; plan anew for"
                " it"
            )
        for name in ("rows", "sequence"):
            is_, has = getattr(plan, name), getattr(request, name)
            if is_ != has:
                raise OutsizeError(f"plan is for {name} {is_}, and the batch has {has}; plan anew")
        return replace(plan, budget=self.budget)


def settings_of(
    model: nn.Module,
    plan: Plan | str | Path | None,
    memory: str | int | None,
    loss: Loss | ByTarget | None,
    count: Callable[[Any], float] | None,
    blocks: str | Sequence[str] | None,
    microbatches: int,
    clip: float | None,
    options: Options,
) -> Settings:
    """What a job is made with, of what `prepare` was told. OutsizeError for what cannot be."""
    if not isinstance(model, nn.Module):
        raise OutsizeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, Decoder):
        check_here(model)
    _check_numbers(microbatches, clip)
    said: Options = {**PLAIN, **options}
    given = None if plan is None else _plan_given(plan, model)
    if given is not None:
        _refuse_said_twice(microbatches, said)
        memory = given.budget if memory is None else memory
        microbatches, mesh, shards, line = (
            given.microbatches, given.mesh, given.shards, given.pipeline
        )  # fmt: skip
    else:
        mesh, order = _mesh(said["mesh"]), said["pipeline"]
        line = pipelined(order) if isinstance(order, str) else order
        shards = stage_of(said["zero"], mesh.data)
    if not isinstance(model, Decoder):
        check_adopted(mesh, type(model).__name__)
    again = said["recompute"]
    own, by_target = _losses(model, loss, count)
    made = Settings(
        loss=SumOfRows(own, count) if own is not None and count is not None else own,
        by_target=by_target,
        count=count,
        blocks=() if isinstance(model, Decoder) else _blocks(model, blocks, mesh),
        named=blocks is not None,
        microbatches=microbatches,
        clip=clip,
        recompute=None if again is None else tuple(again),
        budget=None if memory is None else parse_bytes(memory),
        precision=_precision(model, said["precision"]) if given is None else given.precision,
        tiers=_tiers(said, memory, given),
        mesh=mesh,
        shards=shards,
        sequence_parallel=given.sequence_parallel if given else said["sequence_parallel"],
        pipeline=line,
        plan=given,
    )
    _check_sums(model, made)
    _check_pipeline(made)
    _check_vocabulary(model, made)
    _check_spread(model, made)
    return made


def _plan_given(plan: Plan | str | Path, model: nn.Module) -> Plan:
    """The plan, of a file where a path is given. OutsizeError for that of another model or of
    another number of workers than there are."""
    if not isinstance(plan, (Plan, str, Path)):
        raise OutsizeError(f"plan is a {type(plan).__name__}; expected an outsize.Plan or its file")
    found = PlanFile(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    source = "plan" if isinstance(plan, Plan) else f"plan file {plan}"
    if isinstance(model, Decoder):
        shapes = ((name, tuple(p.shape)) for name, p in model.named_parameters())
        found.check_model(source, "this model", len(model.blocks) + 2, digest_of(shapes))
    size, started = found.plan.mesh.size, int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        raise OutsizeError(
            f"{source} is for {counted(size, 'worker')}, and {started} started; start as many, or"
            " plan anew"
        )
    return found.plan


def _refuse_said_twice(microbatches: int, said: Options) -> None:
    """OutsizeError for an argument that the plan has its own of."""
    asked = {"microbatches": microbatches != 1} | {
        name: said[name] != PLAIN[name]
        for name in ("recompute", "precision", "mesh", "zero", "sequence_parallel", "pipeline")
    }
    for name, given in asked.items():
        if given:
            raise OutsizeError(f"{name} is given beside plan, which says it; leave it out")


def _mesh(mesh: str | Mesh | None) -> Mesh:
    """The mesh of this run: as given, or all workers that torchrun has started on the data axis."""
    if mesh is None:
        return Mesh(data=int(os.environ.get("WORLD_SIZE", "1")))
    return parse_mesh(mesh) if isinstance(mesh, str) else mesh


def _tiers(said: Options, memory: str | int | None, given: Plan | None) -> tuple[TierSpec, ...]:
    """Below the device, as declared."""
    near = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    specs = specs_of(said["host_memory"], said["disk"], tuple(said["tiers"]), near)
    if given is not None:
        check_tiers(given, specs, "pass disk, host_memory or tiers")
    if specs and memory is None:
        raise OutsizeError(
            f"{specs[0].name!r} is a tier for what does not fit in memory, and memory is None;"
            " expected bytes that the device may hold: pass memory='2GiB'"
        )
    return specs


def _check_sums(model: nn.Module, made: Settings) -> None:
    """Refuse a batch in parts where the loss is a mean, or statistics are those of the batch."""
    if max(made.microbatches, made.mesh.rows) == 1:
        return
    if not isinstance(model, Decoder) and (made.count is None or made.loss is None):
        many = made.microbatches > 1
        what = f"microbatches is {made.microbatches}" if many else f"mesh is {made.mesh}"
        raise OutsizeError(
            f"{what} without loss and count: a mean of means is not the mean; pass"
            " loss=(output, batch) -> sum and count=batch -> number of targets"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise OutsizeError(
                f"module {name!r} is a {type(module).__name__}: its statistics are those of the"
                " whole batch, which microbatches would change; use microbatches=1"
            )


def _check_spread(model: nn.Module, made: Settings) -> None:
    """Refuse workers that cannot share somebody else's module."""
    if isinstance(model, Decoder):
        return
    name = type(model).__name__
    if made.sequence_parallel:
        raise OutsizeError(
            f"sequence_parallel is for decoders that outsize.load gives, and this is a {name};"
            " leave it out"
        )
    if made.tiers and made.mesh.tensor > 1:
        raise OutsizeError(
            f"mesh is {made.mesh}, {made.tiers[0].name!r} is a tier and this is a {name}; states of"
            " what the automatic rules cut stay on the device: leave out the tiers"
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


def _check_pipeline(made: Settings) -> None:
    """Refuse a pipeline that cannot be."""
    mesh, order = made.mesh, made.pipeline
    if mesh.pipeline == 1:
        return
    named(order.schedule, Shape(mesh.pipeline, made.microbatches, Costs(*order.costs)))
    if made.tiers:
        raise OutsizeError(
            f"mesh is {mesh} and states may rest on tiers; workers of a pipeline have a part of the"
            " model each instead: leave out host_memory, disk and tiers"
        )


def _check_vocabulary(model: nn.Module, made: Settings) -> None:
    """Refuse a vocabulary that nobody can cut."""
    order = made.pipeline
    if not order.vocabulary:
        return
    if made.mesh.pipeline == 1:
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


def _precision(model: nn.Module, name: str | None) -> Precision:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if name is None and len(dtypes) > 1:
        raise OutsizeError(
            f"model holds parameters of {', '.join(sorted(map(str, dtypes)))}; expected one dtype:"
            " convert it with model.to(dtype), or pass precision="
        )
    return Precision.named(name or str(dtypes.pop()).removeprefix("torch."))
