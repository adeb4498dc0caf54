"""Everything that is known before a run starts: its values, model, machine and forecast.

Nothing of the model or the data is allocated or read here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outsize import accelerator
from outsize.collectives import Mesh, parse_mesh
from outsize.errors import OutsizeError, counted
from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.hardware.shared import shared
from outsize.memory import format_bytes, parse_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.models.coding import plain
from outsize.models.config import DecoderConfig
from outsize.optim import LearningRate
from outsize.optim.optimizer import precision_for
from outsize.parallel.check.checker import refuse
from outsize.parallel.check.decoder import Spread, check_decoder
from outsize.parallel.tensor.by_rows import check_by_rows
from outsize.parallel.tensor.declared import boundaries
from outsize.parallel.tensor.rewired import check_wiring
from outsize.parallel.tensor.units import check, cuts_of
from outsize.plan import Plan, Precision, Sharding
from outsize.plan.settings import PLAN_SETTINGS
from outsize.plan.spread import sharding
from outsize.search import PlanRequest, TooSmall, choose, predict, replayed
from outsize.search.pipeline_request import check as check_pipeline
from outsize.search.pipeline_request import check_cut, continued
from outsize.simulate import Forecast
from outsize.train import derive
from outsize.train.config import RunConfig
from outsize.train.first_values import filling_of
from outsize.train.model import Subject, subject
from outsize.train.planned import plan_of
from outsize.train.recipe import check_taken, recipe_of, weighed
from outsize.train.resolve import Resolved
from outsize.train.tiers import (
    check_memory,
    check_tiers,
    declared,
    missing_tiers,
    plannable,
    with_tiers,
)

if TYPE_CHECKING:
    from outsize.train.history import Entry

# What of a plan decides in which order sums are taken: a run keeps it whatever its memory is.
FIXED = ("microbatch_rows", "loss_chunk", "mlp_tile", "order")


@dataclass(frozen=True)
class Setup:
    """A run that could start. paces: of each worker while 1, 2, ... compute, where measured.
    foretold: its forecasts before runs like it had a say in them (outsize/train/history.py)."""

    resolved: Resolved
    subject: Subject
    hardware: Hardware
    forecast: Forecast
    tiers: tuple[TierSpec, ...] = ()  # below the device, as declared
    paces: tuple[float, ...] = ()
    foretold: tuple[Entry, ...] = ()

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def device(self) -> torch.device:
        """Where the run's tensors are."""
        apart = self.hardware.devices[0].apart
        return accelerator.find(accelerator.there() or "gpu" if apart else "cpu")


def set_up(
    resolved: Resolved,
    plan: Plan | None = None,
    model: Subject | None = None,
    fit: bool = True,
    hardware: Hardware | None = None,
    exact: bool = False,
    seen: bool = False,
    tiers: tuple[TierSpec, ...] | None = None,
) -> Setup:
    """Fill in what the plan needs, choose the plan (unless given) and predict it.

    model: where it is known already. fit: refuse what does not fit in the memory that is free.
    hardware: as the first worker has it, else this machine, probed. tiers: else as keys declare
    them. exact: the plan is taken as it is, or refused; else another with the same numbers where it
    does not fit. seen: the first worker has seen to the layouts of this plan over this model. Sets
    PyTorch's number of threads. OutsizeError for whatever makes the run impossible.
    """
    resolved = derive.threads(resolved)
    torch.set_num_threads(resolved.get("threads"))
    again = model is not None  # of a checkpoint, whose weights are stored
    if model is None:
        resolved, model = subject(derive.source(resolved))
    count = near(resolved.config)
    specs = declared(resolved.config, count) if tiers is None else tiers
    if hardware is None:
        hardware = probe(None if resolved.get("device") == "auto" else resolved.get("device"))
        hardware = shared(with_tiers(hardware, specs, count), count)
    resolved = derive.before_plan(resolved, model.config, hardware.devices[0])
    _check_precision(resolved, hardware)
    random = resolved.get("model.weights") == "random" and not again
    filling = filling_of(None if random else model.directory, model.config)
    device = hardware.devices[0]
    kind = accelerator.there() if device.apart else ""
    request = replace(
        request_of(resolved, specs), filling=filling, apart=device.apart, kind=kind or "cpu",
        grain=device.grain, whole=model.config.whole_documents,
    )  # fmt: skip
    check_memory(hardware, request.budget, specs)
    check_pipeline(request, len(model.config.layers) + 2)
    given = plan if exact or plan is not None else plan_of(resolved, model.config)
    if given is None:
        check_cut(request)
    if seen and plan is not None:
        settings = request.settings.having(dict(plan.settings.laying.said))
        request = replace(request, settings=settings, sequence_parallel=plan.sequence_parallel)
    else:
        check_layouts(model.config, request)
        request = _wired(model.config, request)
    if given is not None and (exact or plan is None):
        predicted = _given(model, request, given, hardware, fit)
    elif plan is None:
        predicted = _chosen(model, request, hardware, fit)
    else:
        predicted = _continued(model, request, plan, hardware)
    made = predicted.plan
    if made.by_rows and not seen:  # else it has been asked
        laid = replace(request, settings=made.settings, sequence_parallel=made.sequence_parallel)
        check_layouts(model.config, laid)
    predicted.prove()
    return Setup(resolved, model, hardware, predicted, specs)


def _check_precision(resolved: Resolved, hardware: Hardware) -> None:
    """Refuse a precision that the device does not have."""
    device, kind, name = hardware.devices[0], accelerator.there(), resolved.get("precision")
    precision = Precision.named(name)
    if precision.invariant and device.apart:
        raise OutsizeError(
            f"precision is {name!r}, whose kernels are of processors, and the device is"
            f" {device.name}; set precision to {precision.compute}, or device to cpu"
        )
    if not device.apart or not kind:
        return
    if not accelerator.computes_in(torch.device(kind), getattr(torch, precision.compute)):
        raise OutsizeError(
            f"precision is {name!r}, which {device.name} does not compute in; set precision to"
            " float32"
        )


def settled(setup: Setup) -> Setup:
    """The same with everything filled in that depends on the predicted time of a step."""
    resolved = derive.after_plan(setup.resolved, setup.forecast.mean)
    return replace(setup, resolved=derive.output(resolved))


def request_of(resolved: Resolved, specs: tuple[TierSpec, ...] = ()) -> PlanRequest:
    """What the user has fixed of the plan. specs: the tiers below the device."""
    config = resolved.config
    assert config.train.sequence is not None and config.train.batch_tokens is not None
    assert config.precision is not None
    mesh = Mesh() if config.mesh is None else parse_mesh(config.mesh)
    precision = Precision.named(config.precision)
    if precision.compute == "bfloat16" and "bfloat16-weights" in config.plan.approximate:
        precision = replace(precision, master=None)
    recipe = recipe_of(config)
    precision = precision_for(recipe.optimizer, precision)
    return PlanRequest(
        rows=config.train.batch_tokens // config.train.sequence,
        sequence=config.train.sequence,
        precision=precision,
        optimizer=recipe.optimizer,
        clip=recipe.clip,
        techniques=recipe.techniques,
        rates=recipe.rates,
        budget=None if config.memory is None else parse_bytes(config.memory),
        microbatch_rows=config.plan.microbatch_rows,
        recompute=config.plan.recompute,
        loss_chunk=config.plan.loss_chunk,
        mlp_tile=config.plan.mlp_tile,
        split_backward=config.plan.split_backward,
        approximate=config.plan.approximate,
        tiers=specs,
        dropout=config.train.dropout,
        weighed=weighed(config),
        mesh=mesh,
        shards=sharding_of(config),
        gathered=_gathered(config),
        sequence_parallel=config.plan.sequence_parallel,
        pipeline=config.plan.pipeline,
        settings=config.plan.settings,
    )


def check_layouts(config: DecoderConfig, request: PlanRequest) -> None:
    """Refuse a decoder whose layouts over the tensor axis do not fit together, before anything is
    made of it. A rewired model's wiring is not traced: its branches are, as a plain
    model's."""
    size = request.mesh.tensor
    if size > 1:
        check(config, size)
        check_wiring(config, size, parallel := bool(request.sequence_parallel))
        if by_rows := request.settings.by_rows:
            check_by_rows(build(config), by_rows)
        config = plain(config.unwired())
        cuts = cuts_of(build(config), size, 0, parallel, by_rows)
        spread = Spread(cuts, boundaries(parallel, by_rows), by_rows=by_rows)
        refuse(check_decoder(config, size, spread))


def _wired(config: DecoderConfig, request: PlanRequest) -> PlanRequest:
    """What leaves it open whether tokens between branches are cut, and whether blocks share rows,
    for a model that has that."""
    for name, one in PLAN_SETTINGS.items():
        if one.by_rows and request.mesh.tensor > 1 and request.settings.get(name) is None:
            try:
                some = request.settings.having({name: 1})
                check_layouts(config, replace(request, settings=some))
            except OutsizeError:
                request = replace(request, settings=request.settings.having({name: 0}))
    if request.sequence_parallel is None:
        try:
            check_layouts(config, replace(request, sequence_parallel=True))
        except OutsizeError:
            return replace(request, sequence_parallel=False)
    return request


def near(config: RunConfig) -> int:
    """Workers of this run on this machine; torchrun says so, others start all of them here."""
    size = 1 if config.mesh is None else parse_mesh(config.mesh).size
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def _gathered(config: RunConfig) -> int:
    """How many stages' weights are gathered at once."""
    count, shards = config.plan.gathered, sharding_of(config)
    if count is None:
        return 2
    if shards is not None and shards.parameters > 1:
        return count
    raise OutsizeError(
        f"plan.gathered is {count}, but weights are not cut over workers; leave it out, or set"
        " plan.zero to 3 with several workers"
    )


def sharding_of(config: RunConfig) -> Sharding | None:
    """How the data axis cuts states, where the user says; None where the planner chooses."""
    said, data = config.plan.zero, 1 if config.mesh is None else parse_mesh(config.mesh).data
    return None if said is None else sharding(said, data, "plan.zero")


def rates_of(config: RunConfig) -> LearningRate:
    """The learning rate's factor by step."""
    own = config.learning_rate
    assert config.train.steps is not None and own.warmup is not None
    return LearningRate(own.shape, config.train.steps, own.warmup, own.final, own.decay)


def rate_of(config: RunConfig, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    return (config.optimizer.lr or 0.0) * rates_of(config).factor(step)


def _chosen(model: Subject, request: PlanRequest, hardware: Hardware, fit: bool) -> Forecast:
    check_taken(model.config, request.optimizer)
    if request.budget is not None or not fit:
        return _choose(model, request, hardware)
    made = choose(model.config, replace(request, tiers=()), hardware)
    free = plannable(hardware, request.tiers)
    if made.peak <= free:
        return made
    made = _choose(model, replace(request, budget=free), hardware)
    return replace(made, plan=replace(made.plan, budget=None))


def _choose(model: Subject, request: PlanRequest, hardware: Hardware) -> Forecast:
    """The plan; where nothing rests below the device, a refusal says that it could."""
    try:
        return choose(model.config, request, hardware)
    except TooSmall as error:
        if request.tiers:
            raise
        raise OutsizeError(
            f"{error}; or pass --disk DIR, where states may rest that do not fit"
        ) from None


def _given(
    model: Subject, request: PlanRequest, plan: Plan, hardware: Hardware, fit: bool
) -> Forecast:
    """A plan that the user has, as it is. OutsizeError where it cannot be: a tier is missing, or
    the memory that it needs."""
    remedy = "--disk DIR, --host-memory SIZE or --tier NAME=PATH:SIZE"
    check_tiers(plan, request.tiers, remedy)
    check_taken(model.config, request.optimizer)
    if plan.precision != request.precision:
        raise OutsizeError(
            f"the plan computes in {plan.precision}, and the run in {request.precision}; plan anew"
        )
    made = predict(model.config, request, replace(plan, budget=request.budget), hardware)
    budget = plannable(hardware, request.tiers) if request.budget is None else request.budget
    if made.peak > budget and (fit or request.budget is not None):
        raise OutsizeError(
            f"memory of {format_bytes(budget)} is too small for the plan: "
            f" {counted(made.peak - budget, 'byte')} missing; set memory to"
            f" {-(-made.peak // 2**20)}MiB, or plan anew"
        )
    return made


def _continued(model: Subject, request: PlanRequest, plan: Plan, hardware: Hardware) -> Forecast:
    """The plan of a run that goes on; where it does not fit the memory that there is now, or lacks
    a tier, another that gives the same numbers."""
    shards = request.shards or Sharding(1, 1, request.mesh.data)
    if plan.mesh == request.mesh and request.shards is None:
        shards = plan.shards
    others = plan.mesh != request.mesh
    plan = continued(plan, request, shards)
    budget = plannable(hardware, request.tiers) if request.budget is None else request.budget
    if not missing_tiers(plan, request.tiers):
        made = replayed(model.config, request, plan, hardware)
        free = request.budget is None and not (others and request.tiers)
        if free or made.peak <= budget:
            return made
    settings = plan.settings.closed
    same = {name: getattr(plan, name) for name in (*FIXED, "sequence_parallel")}
    line = request.pipeline or plan.pipeline.said
    fixed = replace(request, budget=budget, settings=settings, pipeline=line, **same)
    chosen = _choose(model, fixed, hardware).plan
    made = predict(model.config, request, _same_sums(plan, chosen), hardware)
    if made.peak > budget:
        raise OutsizeError(
            f"memory of {format_bytes(budget)} is too small to go on with the same numbers:"
            f" {counted(made.peak - budget, 'byte')} missing; set memory above"
            f" {-(-made.peak // 2**20)}MiB"
        )
    return made


def _same_sums(plan: Plan, chosen: Plan) -> Plan:
    """A plan as chosen, that takes sums in the order of `plan`: where techniques have a say in it,
    the blocks that are recomputed stay the same."""
    stages = chosen.stages
    if plan.settings.summing().changed.said:
        both = zip(plan.stages, chosen.stages, strict=True)
        stages = tuple(replace(s, rest=new.rest, spill=new.spill) for s, new in both)
    kept = replace(chosen, stages=stages, budget=plan.budget, row_shares=plan.row_shares)
    assert all(getattr(kept, name) == getattr(plan, name) for name in FIXED), (kept, plan)
    assert kept.settings.summing() == plan.settings.summing(), (kept, plan)
    return kept
