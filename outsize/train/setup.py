"""Everything that is known before a run starts: its values, model, machine and forecast.

Nothing of the model or the data is allocated or read here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outsize.data import Batch, TrainStream
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.memory import format_bytes, parse_bytes
from outsize.memory.tiers import TierSpec
from outsize.optim import LearningRate, Optimizer
from outsize.optim import parse as parse_optimizer
from outsize.plan import Plan, Precision
from outsize.search import Wish, choose, foretell
from outsize.simulate import Forecast, calibrate
from outsize.simulate.calibrate import COUNTED, WARM
from outsize.train import derive
from outsize.train.config import RunConfig
from outsize.train.model import Subject, subject
from outsize.train.resolve import DERIVED, Resolved
from outsize.train.tiers import check_memory, declared, named, plannable, with_tiers

TRIAL_SECONDS = 30.0  # a calibration that the machine's rates foretell to take longer is left out
FASTER = 0.9  # of the time with all threads: one thread must be so much faster to be taken
# What of a plan decides in which order sums are taken: a run keeps it whatever its memory is.
FIXED = ("microbatch_rows", "loss_chunk", "mlp_tile", "sequence_chunk", "order")

# Names under plan.approximate that a loop in Python carries out.
BY_HAND = (
    ("zeroth-order", "outsize.runtime.zeroth.ZerothJob"),
    ("frozen-by-dynamics", "outsize.runtime.freezing.Freezing"),
)


@dataclass(frozen=True)
class Setup:
    """A run that could start."""

    resolved: Resolved
    subject: Subject
    hardware: Hardware
    forecast: Forecast
    tiers: tuple[TierSpec, ...] = ()  # below the device, as declared

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def plan(self) -> Plan:
        return self.forecast.plan

    @property
    def device(self) -> torch.device:
        """Where the run's tensors are."""
        return torch.device("cpu" if self.hardware.devices[0].kind == "cpu" else "cuda")


def set_up(
    resolved: Resolved,
    plan: Plan | None = None,
    model: Subject | None = None,
    fit: bool = True,
) -> Setup:
    """Fill in what the plan needs, choose the plan (unless given) and foretell it.

    model: where it is known already. fit: refuse what does not fit in the memory that is free.
    Sets PyTorch's number of threads. OutsizeError for whatever makes the run impossible.
    """
    resolved = resolved.derive("threads", torch.get_num_threads(), "PyTorch's own choice here")
    torch.set_num_threads(resolved.get("threads"))
    if model is None:
        resolved, model = subject(resolved)
    hardware = probe(None if resolved.get("device") == "auto" else resolved.get("device"))
    specs = declared(resolved.config)
    hardware = with_tiers(hardware, specs)
    resolved = derive.before_plan(resolved, model.config, hardware.devices[0])
    wish = wish_of(resolved, specs)
    check_memory(hardware, wish.budget, specs)
    if plan is None:
        foretold = _chosen(model, wish, hardware, fit)
    else:
        foretold = _continued(model, wish, plan, hardware)
    return Setup(resolved, model, hardware, foretold, specs)


def calibrated(setup: Setup, stream: TrainStream) -> Setup:
    """The same with step times measured on one block of each sort, where that is quick.

    Where the number of threads was left open, one thread is tried too: small models on a busy
    machine run faster on it.
    """
    plan = setup.plan
    trial = setup.forecast.seconds / plan.microbatches * (WARM + COUNTED)
    if trial > TRIAL_SECONDS or setup.forecast.below:  # what streams may not fit all at once
        return setup
    batch, threads = stream.batch(0), setup.resolved.get("threads")
    all_threads = _timed(setup, batch)
    if threads == 1 or not setup.resolved.is_derived("threads"):
        return replace(setup, forecast=all_threads)
    torch.set_num_threads(1)
    alone = _timed(setup, batch)
    if alone.seconds < FASTER * all_threads.seconds:
        reason = f"a step takes {alone.seconds:.3g} s, with {threads} {all_threads.seconds:.3g} s"
        resolved = setup.resolved.with_value("threads", 1, f"{DERIVED}{reason}")
        return replace(setup, resolved=resolved, forecast=alone)
    torch.set_num_threads(threads)
    return replace(setup, forecast=all_threads)


def _timed(setup: Setup, batch: Batch) -> Forecast:
    return calibrate(
        setup.forecast,
        setup.subject.config,
        optimizer_of(setup.config),
        setup.config.train.clip,
        lambda rows: batch.rows(0, rows),
        setup.device.type,
    )


def settled(setup: Setup) -> Setup:
    """The same with everything filled in that depends on the foretold time of a step."""
    resolved = derive.after_plan(setup.resolved, setup.forecast.seconds)
    return replace(setup, resolved=derive.output(resolved))


def wish_of(resolved: Resolved, specs: tuple[TierSpec, ...] = ()) -> Wish:
    """What the user has fixed of the plan. specs: the tiers below the device."""
    config = resolved.config
    assert config.train.sequence is not None and config.train.batch_tokens is not None
    assert config.precision is not None
    for name, where in BY_HAND:
        if name in config.plan.approximate:
            raise OutsizeError(
                f"plan.approximate holds {name}, which `outsize train` does not carry out; use"
                f" {where} from Python, or leave the name out"
            )
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
    )


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


def _chosen(model: Subject, wish: Wish, hardware: Hardware, fit: bool) -> Forecast:
    if wish.budget is not None or not fit:
        return _choose(model, wish, hardware)
    made = choose(model.config, replace(wish, tiers=()), hardware)
    free = plannable(hardware, wish.tiers)
    if made.peak <= free:
        return made
    made = _choose(model, replace(wish, budget=free), hardware)
    return replace(made, plan=replace(made.plan, budget=None))


def _choose(model: Subject, wish: Wish, hardware: Hardware) -> Forecast:
    """The plan; where nothing rests below the device, a refusal says that it could."""
    try:
        return choose(model.config, wish, hardware)
    except OutsizeError as error:
        if wish.tiers:
            raise
        raise OutsizeError(
            f"{error}; or pass --disk DIR, where states may rest that do not fit"
        ) from None


def _continued(model: Subject, wish: Wish, plan: Plan, hardware: Hardware) -> Forecast:
    """The plan of a run that goes on; where it does not fit the memory that there is now, or lacks
    a tier, another that gives the same numbers."""
    plan = replace(plan, budget=wish.budget)
    missing = named(plan) - {spec.name for spec in wish.tiers}
    if not missing:
        made = foretell(model.config, wish, plan, hardware)
        if wish.budget is None or made.peak <= wish.budget:
            return made
    budget = plannable(hardware, wish.tiers) if wish.budget is None else wish.budget
    fixed = replace(
        wish,
        budget=budget,
        microbatch_rows=plan.microbatch_rows,
        loss_chunk=plan.loss_chunk,
        mlp_tile=plan.mlp_tile,
        sequence_chunk=plan.sequence_chunk,
        order=plan.order,
    )
    chosen = _choose(model, fixed, hardware).plan
    made = foretell(model.config, wish, _same_sums(plan, chosen), hardware)
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
