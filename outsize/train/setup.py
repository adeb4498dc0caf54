"""Everything that is known before a run starts: its values, model, machine and forecast.

Nothing of the model or the data is allocated or read here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from outsize.collectives import Mesh, parse_mesh
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.hardware.shared import shared
from outsize.memory import format_bytes, parse_bytes
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.optim import LearningRate, Optimizer
from outsize.optim import parse as parse_optimizer
from outsize.parallel.check import refuse
from outsize.parallel.check_decoder import Spread, check_decoder
from outsize.parallel.declared import boundaries
from outsize.parallel.rewired import check_ways
from outsize.parallel.units import check, cuts_of
from outsize.plan import Plan, Precision, Sharding, zero
from outsize.search import TooSmall, Wish, choose, foretell
from outsize.search.pipelined import check as check_pipeline
from outsize.search.pipelined import check_cut, continued
from outsize.simulate import Forecast
from outsize.train import derive
from outsize.train.config import RunConfig
from outsize.train.model import Subject, subject
from outsize.train.resolve import Resolved
from outsize.train.special import Special, special_of
from outsize.train.tiers import check_memory, declared, named, plannable, with_tiers

# What of a plan decides in which order sums are taken: a run keeps it whatever its memory is.
FIXED = ("microbatch_rows", "loss_chunk", "mlp_tile", "sequence_chunk", "order")


@dataclass(frozen=True)
class Setup:
    """A run that could start. paces: of each worker while 1, 2, ... compute, where measured."""

    resolved: Resolved
    subject: Subject
    hardware: Hardware
    forecast: Forecast
    tiers: tuple[TierSpec, ...] = ()  # below the device, as declared
    paces: tuple[float, ...] = ()

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def special(self) -> Special:
        """What is named under plan.approximate."""
        return special_of(self.config)

    @property
    def device(self) -> torch.device:
        """Where the run's tensors are."""
        return torch.device("cpu" if self.hardware.devices[0].kind == "cpu" else "cuda")


def set_up(
    resolved: Resolved,
    plan: Plan | None = None,
    model: Subject | None = None,
    fit: bool = True,
    hardware: Hardware | None = None,
) -> Setup:
    """Fill in what the plan needs, choose the plan (unless given) and foretell it.

    model: where it is known already. fit: refuse what does not fit in the memory that is free.
    hardware: as the setup of the first worker has it; this machine is probed where none is given.
    Sets PyTorch's number of threads. OutsizeError for whatever makes the run impossible.
    """
    resolved = resolved.derive("threads", torch.get_num_threads(), "PyTorch's own choice here")
    torch.set_num_threads(resolved.get("threads"))
    if model is None:
        resolved, model = subject(resolved)
    near = _near(resolved.config)
    specs = declared(resolved.config, near)
    if hardware is None:
        hardware = probe(None if resolved.get("device") == "auto" else resolved.get("device"))
        hardware = shared(with_tiers(hardware, specs, near), near)
    resolved = derive.before_plan(resolved, model.config, hardware.devices[0])
    wish = wish_of(resolved, specs)
    check_memory(hardware, wish.budget, specs)
    check_pipeline(wish, len(model.config.layers) + 2)
    if plan is None:
        check_cut(wish)
    check_layouts(model.config, wish)
    way = special_of(resolved.config)
    if plan is None:
        foretold = _chosen(model, wish, hardware, fit, way)
    else:
        foretold = _continued(model, wish, plan, hardware, way)
    return Setup(resolved, model, hardware, foretold, specs)


def settled(setup: Setup) -> Setup:
    """The same with everything filled in that depends on the foretold time of a step."""
    resolved = derive.after_plan(setup.resolved, setup.forecast.seconds)
    return replace(setup, resolved=derive.output(resolved))


def wish_of(resolved: Resolved, specs: tuple[TierSpec, ...] = ()) -> Wish:
    """What the user has fixed of the plan. specs: the tiers below the device."""
    config = resolved.config
    assert config.train.sequence is not None and config.train.batch_tokens is not None
    assert config.precision is not None
    if "delayed-update" in config.plan.approximate:
        raise OutsizeError(
            "plan.approximate holds delayed-update, for which `outsize train` places no states; use"
            " outsize.runtime.delayed.Delayed from Python, or leave the name out"
        )
    mesh = Mesh() if config.mesh is None else parse_mesh(config.mesh)
    precision = Precision.named(config.precision)
    if config.precision == "bfloat16" and "bfloat16-weights" in config.plan.approximate:
        precision = replace(precision, master=None)
    return Wish(
        rows=config.train.batch_tokens // config.train.sequence,
        sequence=config.train.sequence,
        precision=precision,
        optimizer=optimizer_of(config),
        clip=config.train.clip,
        budget=None if config.memory is None else parse_bytes(config.memory),
        microbatch_rows=config.plan.microbatch_rows,
        recompute=config.plan.recompute,
        loss_chunk=config.plan.loss_chunk,
        mlp_tile=config.plan.mlp_tile,
        sequence_chunk=config.plan.sequence_chunk,
        split_backward=config.plan.split_backward,
        approximate=config.plan.approximate,
        tiers=specs,
        dropout=config.train.dropout,
        mesh=mesh,
        shards=_shards(config),
        gathered=_gathered(config),
        sequence_parallel=config.plan.sequence_parallel and mesh.tensor > 1,
        overlap=config.plan.overlap if mesh.tensor > 1 else 0,
        pipeline=config.plan.pipeline,
    )


def check_layouts(config: DecoderConfig, wish: Wish) -> None:
    """Refuse a decoder whose layouts over the tensor axis do not fit together, before anything is
    made of it. A ladder or Kraken model's wiring is not traced: its branches are, as a plain
    model's."""
    size = wish.mesh.tensor
    if size > 1:
        check(config, size)
        check_ways(config.ways, size, wish.sequence_parallel)
        config = replace(config, ladder_from=None, ways=1)
        cuts = cuts_of(build(config), size, 0, wish.sequence_parallel)
        spread = Spread(cuts, boundaries(wish.sequence_parallel))
        refuse(check_decoder(config, size, spread))


def _near(config: RunConfig) -> int:
    """Workers of this run on this machine; torchrun says so, others start all of them here."""
    size = 1 if config.mesh is None else parse_mesh(config.mesh).size
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def _gathered(config: RunConfig) -> int:
    """How many stages' weights are gathered at once."""
    count, shards = config.plan.gathered, _shards(config)
    if count is None:
        return 2
    if shards is not None and shards.parameters > 1:
        return count
    raise OutsizeError(
        f"plan.gathered is {count}, but weights are not cut over workers; leave it out, or set"
        " plan.zero to 3 with several workers"
    )


def _shards(config: RunConfig) -> Sharding | None:
    """How the data axis cuts states, where the user says; None where the planner chooses."""
    said, data = config.plan.zero, 1 if config.mesh is None else parse_mesh(config.mesh).data
    if said is None:
        return None
    if isinstance(said, int):
        return zero(said, data)
    if len(said) != 3 or min(said) < 1:
        raise OutsizeError(
            f"plan.zero is {list(said)}; expected 0 to 3, or three numbers from 1 on: over how many"
            " workers weights, gradients, optimizer states are cut, as [1, 1, 2]"
        )
    return Sharding(*said)


def optimizer_of(config: RunConfig) -> Optimizer:
    """The optimizer of a run whose learning rate is known."""
    own = config.optimizer
    assert own.lr is not None
    return parse_optimizer(own.name, own.lr, own.weight_decay, own.betas)


def rates_of(config: RunConfig) -> LearningRate:
    """The learning rate's factor by step."""
    own = config.schedule
    assert config.train.steps is not None and own.warmup is not None
    return LearningRate(own.shape, config.train.steps, own.warmup, own.final, own.decay)


def _chosen(model: Subject, wish: Wish, hardware: Hardware, fit: bool, way: Special) -> Forecast:
    if wish.budget is not None or not fit:
        return _choose(model, wish, hardware, way)
    made = _plain(model, replace(wish, tiers=()), hardware, way)
    free = plannable(hardware, wish.tiers)
    if made.peak <= free:
        return made
    made = _choose(model, replace(wish, budget=free), hardware, way)
    return replace(made, plan=replace(made.plan, budget=None))


def _plain(model: Subject, wish: Wish, hardware: Hardware, way: Special) -> Forecast:
    if way.plans:
        return way.choose(model.config, wish, hardware)
    return choose(model.config, wish, hardware)


def _foretell(model: Subject, wish: Wish, plan: Plan, hardware: Hardware, way: Special) -> Forecast:
    if way.plans:
        return way.foretell(model.config, wish, plan, hardware)
    return foretell(model.config, wish, plan, hardware)


def _choose(model: Subject, wish: Wish, hardware: Hardware, way: Special) -> Forecast:
    """The plan; where nothing rests below the device, a refusal says that it could."""
    try:
        return _plain(model, wish, hardware, way)
    except TooSmall as error:
        if wish.tiers:
            raise
        raise OutsizeError(
            f"{error}; or pass --disk DIR, where states may rest that do not fit"
        ) from None


def _continued(
    model: Subject, wish: Wish, plan: Plan, hardware: Hardware, way: Special
) -> Forecast:
    """The plan of a run that goes on; where it does not fit the memory that there is now, or lacks
    a tier, another that gives the same numbers."""
    shards = wish.shards or Sharding(1, 1, wish.mesh.data)
    if plan.mesh == wish.mesh and wish.shards is None:
        shards = plan.shards
    others = plan.mesh != wish.mesh
    plan = continued(plan, wish, shards)
    missing = named(plan) - {spec.name for spec in wish.tiers}
    budget = plannable(hardware, wish.tiers) if wish.budget is None else wish.budget
    if not missing:
        made = _foretell(model, wish, plan, hardware, way)
        free = wish.budget is None and not (others and wish.tiers)
        if free or made.peak <= budget:
            return made
    fixed = replace(
        wish,
        budget=budget,
        microbatch_rows=plan.microbatch_rows,
        loss_chunk=plan.loss_chunk,
        mlp_tile=plan.mlp_tile,
        sequence_chunk=plan.sequence_chunk,
        order=plan.order,
    )
    chosen = _choose(model, fixed, hardware, way).plan
    made = _foretell(model, wish, _same_sums(plan, chosen), hardware, way)
    if made.peak > budget:
        raise OutsizeError(
            f"memory of {format_bytes(budget)} is too small to go on with the same numbers:"
            f" {made.peak - budget} bytes missing; set memory above {-(-made.peak // 2**20)}MiB"
        )
    return made


def _same_sums(plan: Plan, chosen: Plan) -> Plan:
    """A plan as chosen, that takes sums in the order of `plan`. Blocks that run in chunks of the
    sequence are those that did."""
    stages = chosen.stages
    if plan.sequence_chunk:
        both = zip(plan.stages, chosen.stages, strict=True)
        stages = tuple(replace(s, rest=new.rest, spill=new.spill) for s, new in both)
    kept = replace(chosen, stages=stages, budget=plan.budget)
    assert all(getattr(kept, name) == getattr(plan, name) for name in FIXED), (kept, plan)
    return kept
