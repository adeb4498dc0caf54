"""What a zeroth-order step is made of: settings, where the weights rest, and the schedule.

A step updates every stage and then takes all microbatches through it twice, with either sign, while
its weights are present (outsize/runtime/zeroth.py plays it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from outsize.errors import OutsizeError
from outsize.memory.chunk import ChunkTable, Dtypes
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.runtime.placement import Placement
from outsize.schedule import Action, Kind, Schedule
from outsize.schedule.holding import Holding
from outsize.schedule.offload import offload

NAME = "zeroth-order"  # what `approximate` must name


@dataclass(frozen=True)
class Zeroth:
    """lr: step size, a hundredth or less of what a gradient takes. epsilon: how far the two losses
    are taken from the weights. weight_decay: of matrices, decoupled. seed: of the directions."""

    lr: float = 1e-6
    epsilon: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0


def check(plan: Plan, settings: Zeroth) -> None:
    """Refuse what cannot be, before anything is allocated."""
    if NAME not in plan.approximate:
        raise OutsizeError(
            f"plan: approximate is {list(plan.approximate)}; a job without gradients changes the"
            f" maths: name {NAME} there"
        )
    for name in ("lr", "epsilon"):
        value = getattr(settings, name)
        if not value > 0 or not math.isfinite(value):
            raise OutsizeError(f"{NAME}: {name} is {value}; expected a positive number")


def placement_of(plan: Plan, layout: Sequence[ChunkTable]) -> Placement:
    """Weights alone, in the dtype of the master copy where the plan has one. A stage needs its own
    only: what it computes with of others was copied when they were here."""
    precision = plan.precision
    held = getattr(torch, precision.master or precision.compute)
    bare = tuple(replace(table, trainable=False) for table in layout)
    uses = tuple((i,) for i in range(plan.segments))
    return Placement(replace(plan, order="layer"), bare, uses, Dtypes(held, held, None, held), ())


def schedule_of(placement: Placement, learns: Sequence[bool]) -> Schedule:
    """A step: every stage updated, then forward for all microbatches with either sign. learns: by
    chunk, whether it is trained; stages without such a chunk are read and never written."""
    plan, stages = placement.plan, len(placement.plan.stages)
    pairs = zip(placement.tables, learns, strict=True)
    moving = {placement.stage_of[table.segment] for table, trained in pairs if trained}
    actions: list[Action] = []
    for s in range(stages):
        actions += [Action(Kind.UPDATE, s)] if s in moving else []
        actions += [Action(Kind.FORWARD, s, m) for m in range(2 * plan.microbatches)]
    base = Schedule(stages, 2 * plan.microbatches, (tuple(actions),), first=stages)
    if not placement.rooms:
        return base
    fixed = frozenset(range(stages)) - moving
    passing = replace(placement.residency, rooms=placement.rooms, fixed=fixed)
    return _proved(offload(base, passing, plan.stream.resident - 1, plan.stream.returned))


def _proved(schedule: Schedule) -> Schedule:
    """Refuse a schedule in which weights would be missing, stale or lost."""
    assert schedule.residency is not None
    holding = Holding(schedule.residency, schedule.stages - 1, schedule.first)
    reasons = [f"action {i} ({a}): {holding.step(a)}" for i, a in enumerate(schedule.workers[0])]
    faults = [*(r for r in reasons if not r.endswith(": ")), *holding.left()]
    assert not faults, faults[0]
    return schedule


def uses_of(flow: Flow, placement: Placement) -> list[tuple[int, ...]]:
    """By stage, the stages whose parameters it computes with, itself first."""
    stage_of, stages = placement.stage_of, placement.plan.stages
    used = ([stage_of[u] for i in range(x.first, x.last) for u in flow.uses[i]] for x in stages)
    return [tuple(dict.fromkeys((s, *others))) for s, others in enumerate(used)]


@contextmanager
def still(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and without changes to the running figures of norms."""
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
