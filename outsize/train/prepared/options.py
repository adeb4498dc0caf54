"""What `prepare` is told, and what is refused of it before anything is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from outsize.checkpoint.hub import check_here
from outsize.collectives import Mesh, parse_mesh
from outsize.data import Batch
from outsize.errors import OutsizeError, counted, expect
from outsize.kernels.entropy import Loss as ByTarget
from outsize.kernels.entropy import LossOptions
from outsize.memory import parse_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.adopt import find_blocks
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.parallel.execution import check_adopted
from outsize.plan import Pipelined, Plan, Precision, Sharding
from outsize.plan.file import PlanFile, digest_of, read_plan
from outsize.plan.settings import NONE, PLAN_SETTINGS
from outsize.plan.settings import Settings as PlanSettings
from outsize.plan.spread import pipelined, sharding
from outsize.search import PlanRequest
from outsize.train.prepared.batches import AsGiven, rows_in
from outsize.train.prepared.loss_sums import SumOfRows
from outsize.train.prepared.refusals import (
    check_approximate,
    check_decoders,
    check_kinds,
    check_numbers,
    check_pipeline,
    check_spread,
    check_sums,
    check_vocabulary,
    without_blocks_that_tell,
)
from outsize.train.tiers import check_tiers, specs_of

Loss = Callable[[Any, Any], Tensor]
GATHERED = 2  # as of a run


class Options(TypedDict, total=False):
    """What `prepare` may be told beside the model and its loss.

    recompute: "block" or names of submodules of the blocks; None leaves it to the plan.
    precision: None keeps the model's own dtype, with a float32 master copy where that has 16 bits;
    losses of float16 are scaled, and a step whose gradient overflows is skipped.

    With memory, states that do not fit rest on tiers: host_memory, RAM beside it, as "4GiB"; disk,
    folders as "DIR[,DIR][:SIZE]"; tiers, memory with a path as "NAME=PATH:SIZE". The model's
    parameters move there at the first step, one chunk at a time, and have no values of their own
    any more: `evaluate` computes with them, `weights` reads them, and the model's own forward, or
    to read one (or optimizer.state), is refused until they are back on the device. Of several
    workers sizes are of each; beside a data axis optimizer states alone go below, of each worker's
    own share.

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

    loss_chunk, mlp_tile: tokens whose logits, whose feed-forward activations exist at once, 0: all;
    None leaves it to the plan, which takes all of an adopted module as long as that fits. Of that,
    loss_chunk is for the cross-entropy of what a linear layer behind the last block gives, whoever
    computes it. split_backward: weight gradients apart from input gradients. gathered: stages whose
    weights are gathered at once. zero may be three numbers, as plan.zero. label_smoothing, z_loss:
    of the loss, in training. All of them, mlp_tile and the last two for native decoders, are as the
    keys of a run that `outsize keys` lists; so are the settings that techniques add to plans, which
    are options by their names.

    approximate: "microbatch-statistics" lets batch normalisation go with microbatches, and with
    rows on several workers, each normalised by its own (outsize/train/prepared/statistics.py).
    """

    recompute: str | Sequence[str] | None
    precision: (
        Literal[
            "float32", "float64", "bfloat16", "float16", "float32+invariant", "bfloat16+invariant"
        ]
        | torch.dtype
        | None
    )
    host_memory: str | int | None
    disk: str | None
    tiers: Sequence[str]
    mesh: str | Mesh | None
    zero: int | Sequence[int]
    sequence_parallel: bool
    pipeline: str | Pipelined
    loss_chunk: int | None
    mlp_tile: int | None
    split_backward: bool
    gathered: int
    label_smoothing: float
    z_loss: float
    approximate: Sequence[str]


# What they are where nobody says them.
PLAIN: Options = {
    "recompute": None, "precision": None, "host_memory": None, "disk": None, "tiers": (),
    "mesh": None, "zero": 1, "sequence_parallel": False, "pipeline": "1f1b",
    "loss_chunk": None, "mlp_tile": None, "split_backward": False, "gathered": GATHERED,
    "label_smoothing": 0.0, "z_loss": 0.0, "approximate": (),
}  # fmt: skip
_OF_PLANS = (
    "recompute", "precision", "mesh", "zero", "sequence_parallel", "pipeline", "loss_chunk",
    "mlp_tile", "split_backward", "gathered", "approximate",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What `prepare` was told, read. named: the blocks are the user's, not found. plan: the user's,
    whose batches and memory are these; by_target: the loss of a native decoder, to which `added` is
    added in training. said: all options, settings those of techniques."""

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
    said: Options
    settings: PlanSettings
    added: LossOptions
    batches: AsGiven = field(default_factory=AsGiven)

    @property
    def whole(self) -> bool:
        """Whether the module may be computed without cutting it into blocks."""
        return bool(self.blocks) and not (self.named or self.parted or self.tiers or self.plan)

    @property
    def approximate(self) -> tuple[str, ...]:
        """What changes the maths, the optimizer aside."""
        return tuple(self.said["approximate"]) if self.plan is None else self.plan.approximate

    @property
    def parted(self) -> bool:
        """Whether a worker has parts of the model alone."""
        return self.mesh.tensor > 1 or self.mesh.pipeline > 1

    def request(self, optimizer: Optimizer, batch: Any) -> PlanRequest:
        """What is asked of the planner for a batch of this worker. An optimizer that changes the
        maths was asked for by name."""
        native, rows, said = isinstance(batch, Batch), rows_in(batch), self.said
        return PlanRequest(
            rows * self.mesh.rows,
            batch.ids_BS.shape[1] if native else 0,
            self.precision,
            optimizer,
            self.clip,
            self.budget,
            -(-rows // self.microbatches),
            self.recompute,
            said["loss_chunk"] if native else said["loss_chunk"] or 0,
            said["mlp_tile"],
            said["split_backward"],
            approximate=(*self.approximate, *filter(None, (optimizer.approximate,))),
            tiers=self.tiers,
            mesh=self.mesh,
            shards=self.shards,
            sequence_parallel=self.sequence_parallel,
            pipeline=self.pipeline,
            gathered=said["gathered"],
            tiled=native,
            few=True,
            settings=self.settings,
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
        expected = "[]: workers that are prepared bring equally many rows"
        expect(not plan.row_shares, "plan: row_shares", list(plan.row_shares), expected)
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
    if isinstance(model, Decoder):
        check_here(model)
    check_numbers(microbatches, clip)
    said: Options = {**PLAIN, **options}
    check_kinds(model, {"loss": loss, "count": count, "blocks": blocks}, said)
    check_decoders(model, options)
    given = None if plan is None else _plan_given(plan, model)
    if given is not None:
        _refuse_said_twice(microbatches, options)
        memory = given.budget if memory is None else memory
        microbatches, mesh, shards, line = (
            given.microbatches, given.mesh, given.shards, given.pipeline
        )  # fmt: skip
    else:
        mesh, order = _mesh(said["mesh"]), said["pipeline"]
        line = pipelined(order) if isinstance(order, str) else order
        shards = sharding(said["zero"], mesh.data, "zero")
    if not isinstance(model, Decoder):
        check_adopted(mesh, type(model).__name__)
    again = said["recompute"]
    own, by_target = _losses(model, loss, count)
    made = Settings(
        loss=own,
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
        said=said,
        settings=NONE.having({n: v for n, v in options.items() if PLAN_SETTINGS.find(n)}),  # type: ignore[misc]
        added=LossOptions(said["label_smoothing"], said["z_loss"]),
    )
    check_approximate(model, made)
    check_sums(model, made)
    check_pipeline(made)
    check_vocabulary(model, made)
    check_spread(model, made)
    return _as_given(without_blocks_that_tell(model, made))


def _as_given(made: Settings) -> Settings:
    """The same, whose loss and count see batches in the type in which they are handed in."""
    own, count = made.loss and made.batches.loss(made.loss), made.count
    if count is not None:
        count = made.batches.count(count)
        own = own and SumOfRows(own, count)
    return replace(made, loss=own, count=count)


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


def _refuse_said_twice(microbatches: int, options: Options) -> None:
    """OutsizeError for an argument that the plan has its own of."""
    asked = {"microbatches": microbatches != 1} | {
        name: value != PLAIN.get(name, 0)
        for name, value in options.items()
        if name in _OF_PLANS or PLAN_SETTINGS.find(name)
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


def _precision(model: nn.Module, name: str | torch.dtype | None) -> Precision:
    for path, p in model.named_parameters():
        if p.is_complex():
            raise OutsizeError(
                f"parameter {path!r} is of {p.dtype}, and optimizers here take real numbers; keep"
                " torch.view_as_real(it), and torch.view_as_complex in the forward"
            )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if name is None and len(dtypes) > 1:
        raise OutsizeError(
            f"model holds parameters of {', '.join(sorted(map(str, dtypes)))}; expected one dtype:"
            " convert it with model.to(dtype), or pass precision="
        )
    return Precision.named(str(name or dtypes.pop()).removeprefix("torch."))
