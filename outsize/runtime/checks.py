"""What a job refuses before anything is allocated, and how its chunks are laid out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from zlib import crc32

import torch
from torch import nn

from outsize.collectives import Collective, World
from outsize.errors import Everywhere, OutsizeError, nearest
from outsize.memory.chunk import Dtypes
from outsize.models.cuts import NO_CUTS, Cut
from outsize.models.declared import declared_rates
from outsize.models.patterns import rate_of
from outsize.optim import AdamW, Optimizer, check_approximate, taker
from outsize.optim.declared import check_grain
from outsize.optim.optimizer import Apart
from outsize.parallel.messages import code_of
from outsize.plan import DEVICE, Plan, Precision
from outsize.runtime.flow import Flow
from outsize.runtime.recipe import Group, Recipe
from outsize.schedule.action import State
from outsize.schedule.chunks import LINE
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.schedule.layout import Placement
from outsize.torch_private import unset_fake_temporarily

_HALF_DIGIT = (
    2.0**-8
)  # of a bfloat16: what is added to one and is a smaller part of it, may be lost


def dtypes_of(precision: Precision) -> Dtypes:
    """A plan's precision as torch dtypes."""
    master = precision.master
    return Dtypes(
        getattr(torch, precision.compute),
        getattr(torch, precision.gradients),
        None if master is None else getattr(torch, master),
        getattr(torch, precision.optimizer),
    )


def check_weight(weight: float) -> None:
    """Of all targets of a step."""
    if not weight:
        raise Everywhere("batch: no valid target in the whole step; expected one at least")
    if not 0 < weight < float("inf"):
        raise Everywhere(
            f"batch: its targets weigh {weight} together; expected a finite number above 0"
        )


def check_rate(lr: object) -> None:
    """Of a step; None where the optimizer has its own."""
    if lr is not None and not (isinstance(lr, (int, float)) and 0 <= lr < float("inf")):
        raise OutsizeError(f"step: lr is {lr!r}; expected a finite number, 0 or more")


class Retrained(OutsizeError):
    """What trains is not what the job was made for."""


def check_trained(made_for: Iterable[tuple[str, nn.Parameter, bool]]) -> None:
    """Refuse a step where a parameter is not trained as the job was made for: (name, parameter,
    whether it was) of each."""
    for name, parameter, was in made_for:
        if parameter.requires_grad != was:
            raise Retrained(
                f"parameter {name!r}: requires_grad is {parameter.requires_grad}, and was {was}"
                " when the job was made, whose memory is laid out for that: make the job anew, or"
                " set it back"
            )


def check_world(plan: Plan, world: World, cuts: Mapping[str, Cut]) -> None:
    if plan.mesh != world.mesh:
        raise OutsizeError(
            f"plan: mesh is {plan.mesh}, but the workers that run are {world.mesh}; start as many"
            f" as the mesh has, {plan.mesh.size}"
        )
    lying = {one.axis for cut in cuts.values() for one in cut.copies}
    cutting = [axis for axis in plan.mesh.axes if axis.parts or axis.cuts == "weights"]
    wanted = {axis.name: f"mesh.{axis.name} is {plan.mesh[axis.name]}" for axis in cutting}
    if plan.pipeline.ends is not None:
        name, variant = plan.pipeline.ends
        wanted[LINE] = f"pipeline.{name} is {variant}"
    for said in (said for axis, said in wanted.items() if axis not in lying):
        raise OutsizeError(
            f"model: whole, while {said}; cut it with outsize.parallel.divide.divide before, and"
            " hand over what that gives"
        )


def check(flow: Flow, plan: Plan, recipe: Recipe) -> None:
    """Refuse what cannot be, before anything is allocated."""
    clip = recipe.clip
    if plan.precision.invariant:
        from outsize.runtime.invariant import check_invariant

        check_invariant(flow, plan)
    check_approximate(recipe.optimizer, plan.approximate)
    _check_apart(recipe.optimizer, plan)
    _check_moments(recipe.optimizer, plan)
    parts = {name for block in flow.blocks for name, _ in block.named_modules() if name}
    known = ("block", *(part for part in parts if "." not in part))
    for stage in plan.stages:
        for field, names in (("recompute", stage.recompute), ("spill", stage.spill)):
            for name in names:
                if name != "block" and name not in parts:
                    raise OutsizeError(
                        f"plan: {field} holds {name!r}, which is no part of any block"
                        f"{nearest(name, known)}"
                    )
    if plan.update == "behind" and clip is not None:
        raise OutsizeError(
            f"plan: update is 'behind' and gradients are clipped at {clip:g}: the norm is known"
            " only when every stage has its gradient; set clip to null, or update to 'apart'"
        )


def _check_apart(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse plans without the copy of the weights that an optimizer keeps apart, and messages that
    would not give again what an evaluation has replaced."""
    if not isinstance(optimizer, Apart):
        return
    name = type(optimizer).__name__
    if plan.precision.master is None:
        wide = plan.precision.optimizer
        raise OutsizeError(
            f"plan: precision.master is None; expected {wide}, since {name} updates other weights"
            " than those that gradients are taken at: plan anew with this optimizer, or set it to"
            f" {wide}"
        )
    if code_of(plan, "collect") is not None:
        raise OutsizeError(
            f"plan: approximate is {list(plan.approximate)}, whose messages round updated"
            f" parameters, and the optimizer is {name}, whose parameters are made anew after each"
            " evaluation; set plan.collect_bits to 32, or take another optimizer"
        )


def _check_moments(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse states in bfloat16 that are not asked for, or that would stand still."""
    if plan.precision.optimizer != "bfloat16":
        return
    if "bfloat16-weights" not in plan.approximate:
        raise OutsizeError(
            "plan: precision.optimizer is bfloat16, which rounds every moment; set it to float32,"
            " or name bfloat16-weights under approximate"
        )
    for one in (optimizer, optimizer.rest):
        if isinstance(one, AdamW) and 1 - one.betas[1] < _HALF_DIGIT:
            raise OutsizeError(
                f"optimizer: betas[1] is {one.betas[1]:g} and precision.optimizer bfloat16, whose"
                " last digit is larger than what a step adds to a second moment: it would stand"
                f" still; set betas[1] to at most {1 - _HALF_DIGIT:g}, or precision.optimizer to"
                " float32"
            )


def check_pipeline(placement: Placement) -> None:
    """Refuse schedules of a pipeline that do not go with the rest of a plan."""
    _check_summed(placement)
    _check_shares(placement)


def _check_summed(placement: Placement) -> None:
    """Refuse sums over workers of gradients that leave the device before."""
    own = placement.items.residency
    cut = {s for state, s in own.shares if state is State.GRADIENTS}
    for stage in sorted(own.merged | own.summed - cut):
        tier = placement.plan.stages[stage].rest.gradients
        if tier != DEVICE:
            why = (
                "several workers of the pipeline have that stage (a schedule of two ways, or"
                " parameters that stages share)"
                if stage in own.merged
                else "workers of the tensor axis sum some of them (norms where tokens are cut,"
                " heads that several have, or blocks that share rows)"
            )
            raise OutsizeError(
                f"plan: gradients of stage {stage} rest on {tier}, and {why}; let them rest on"
                f" {DEVICE}"
            )


def _check_shares(placement: Placement) -> None:
    """Refuse shares below the device of what is updated on it."""
    chunks, plan = placement.chunks, placement.plan
    for chunk, table in enumerate(chunks.tables):
        stage = chunks.stage_of[table.segment]
        for what in (PARAMETERS, GRADIENTS) if table.trainable else ():
            if placement.items.parted(chunk, what) and plan.stages[stage].rest.optimizer == DEVICE:
                raise OutsizeError(
                    f"plan: {what} of stage {stage} rest on {chunks.tier(chunk, what)}, a share on"
                    f" each worker, and its optimizer states on {DEVICE}, where they would be"
                    " updated; let its optimizer states rest below too"
                )


def check_same(placement: Placement, line: Collective) -> None:
    """Refuse workers of a pipeline that would play different schedules: where their messages have
    the same shapes, nothing else would tell. line: all of them call it."""
    made = placement.chunks.pipelining
    if made is None:
        return
    mine = crc32(repr((made.bounds, made.coarse.schedule.workers)).encode())
    with unset_fake_temporarily():
        ends = line.all_reduce(torch.tensor([mine, -mine], dtype=torch.float64), "max").tolist()
    if ends != [mine, -mine]:
        raise OutsizeError(
            f"plan: the workers of the pipeline would play different schedules, each"
            f" {placement.plan.pipeline.schedule} made for other costs or cut elsewhere; make the"
            " plan on one of them and hand it to the others"
        )


def grouped(flow: Flow, recipe: Recipe) -> tuple[Mapping[str, int], Sequence[Group]]:
    """By parameter its group, and the groups, those that decay first."""
    if recipe.groups is not None and recipe.group_of is not None:
        return recipe.group_of, recipe.groups
    factors = declared_rates(flow.model)
    named = chain.from_iterable(params for _, params in flow.segments)
    kinds = {n: (p.ndim < 2, rate_of(n, recipe.rates) * factors.get(n, 1.0)) for n, p in named}
    every = sorted(set(kinds.values()))
    decay = recipe.optimizer.weight_decay
    groups = [Group(0.0 if vector else decay, rate) for vector, rate in every]
    return {name: every.index(kind) for name, kind in kinds.items()}, groups


def taken_by(flow: Flow, optimizer: Optimizer, cuts: Mapping[str, Cut] = NO_CUTS) -> frozenset[str]:
    """Parameters of the blocks that an optimizer takes and does not leave to its `rest`. cuts: of
    those that lie here in part; one row of a matrix is a part of a matrix all the same."""
    if optimizer.rest is None:
        return frozenset()
    named = chain.from_iterable(params for _, params in flow.segments[1:-1])
    own = ((n, p) for n, p in named if n not in flow.aside)
    shapes = {n: cuts[n].whole if n in cuts else tuple(p.shape) for n, p in own}
    return frozenset(n for n, shape in shapes.items() if optimizer.takes(shape))


def grains_of(optimizer: Optimizer) -> tuple[int, int]:
    """Of what updates the rest, and of the optimizer itself."""
    both = tuple(taker(optimizer, main) for main in (False, True))
    for one in both:
        check_grain(one.grain, one.states)
    return both[0].grain, both[1].grain
