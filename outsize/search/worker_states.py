"""The workers among whose stages a search for tiers chooses: one, or those of a pipeline. Of those
of a data axis, who have shares of the same, the one with the largest stands for all.

Each has the states of its own stages and a pool of its own, so what goes below is chosen for each
by itself, and the one that fits worst decides. What several of them have rests on one tier
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outsize.memory.tiers import TierSpec
from outsize.plan import DEVICE, Plan, Rest
from outsize.schedule.kept import GRADIENTS, PARAMETERS
from outsize.search.tiers import (
    NEAR_FIRST,
    OPTIMIZER,
    Below,
    OnTiers,
    Passing,
    States,
    graded,
    in_order,
    on_tier,
    placed,
    pool_bytes,
    states_of,
)
from outsize.simulate import Forecast
from outsize.simulate.costs import Facts

_KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER)  # as a Rest has them


@dataclass(frozen=True)
class WorkerStates:
    """A worker: its states, and its segments in the order in which their states go below. summed:
    those whose gradients stay on the device, since several workers sum them whole."""

    sizes: States
    order: tuple[int, ...]
    summed: frozenset[int] = frozenset()

    def below(self, level: int, kinds: Sequence[str]) -> Below:
        """What rests below at a level (`tiers.graded`)."""
        made = dict(graded(self.order, level, kinds))
        return made | {GRADIENTS: made[GRADIENTS] - self.summed}

    def resident(self, below: Below) -> int:
        """Bytes of states that the device holds throughout."""
        return self.sizes.total - self.sizes.of(below)

    def held(self, below: Below, passing: Passing) -> int:
        """About the bytes of states on the device, with the least pool."""
        return self.resident(below) + pool_bytes(self.sizes, below, passing)


def worker_states(facts: Facts, plan: Plan) -> tuple[WorkerStates, ...]:
    """The places of a plan's pipeline axis, whose cuts are known; each segment is a stage."""
    found = []
    for turn in range(plan.mesh.pipeline):
        placement = facts.placement(plan, turn)
        own = placement.items.residency
        mine = {table.segment for table in placement.chunks.tables}
        order = in_order(mine, plan.segments)
        summed = own.merged if plan.shards.gradients > 1 else own.merged | own.summed
        found.append(WorkerStates(states_of(placement), order, summed))
    return tuple(found)


@dataclass(frozen=True)
class WorkerCosts:
    """What a forecast says of a worker: bytes of its states on the device, at its peak, and of what
    rests below; seconds that it computes, in the passes and in the updates."""

    resident: int
    peak: int
    below: int
    passes: float
    updates: float


def worker_costs(made: Forecast) -> list[WorkerCosts]:
    """By worker."""
    fixed = ("data", "workspace")  # are no states
    spent = [[0.0, 0.0] for _ in range(len(made.ranks) or 1)]
    for event in made.trace.events:
        if event.lane == "compute":
            spent[event.worker][event.kind == "UPDATE"] += event.end - event.start
    static = [turn.static for turn in made.ranks] or [made.static]
    resident = [sum(n for kind, n in held.items() if kind not in fixed) for held in static]
    each = zip(resident, made.peaks, spent, strict=True)
    return [
        WorkerCosts(size, peak, sum(made.below_of(i).values()), *took)
        for i, (size, peak, took) in enumerate(each)
    ]


# -- tiers -----------------------------------------------------------------------------------------


def rests_of(
    places: Sequence[WorkerStates],
    below: Sequence[Below],
    spilled: Sequence[int],
    tiers: Sequence[TierSpec],
    order: Sequence[str] = NEAR_FIRST,
) -> OnTiers:
    """`tiers.placed` for every worker; short is that of the worker that needs most."""
    each = zip(places, below, spilled, strict=True)
    found = [placed(place.sizes, mine, size, tiers, order) for place, mine, size in each]
    short = max(one.short for one in found)
    depths = {name: depth for depth, name in enumerate((DEVICE, *(tier.name for tier in tiers)))}
    spill = max((one.activations for one in found), key=depths.__getitem__)
    rests = tuple(
        Rest(*(max((getattr(r, kind) for r in mine), key=depths.__getitem__) for kind in _KINDS))
        for mine in zip(*(one.rests for one in found), strict=True)
    )
    if len(places) > 1:  # what several have may lie further down than one of them asked for
        all_of = zip(places, spilled, strict=True)
        if not all(_fits(place, rests, spill, size, tiers) for place, size in all_of):
            short = max(short, 1)
    return OnTiers(rests, spill, short)


def _fits(
    place: WorkerStates, rests: Sequence[Rest], spill: str, spilled: int, tiers: Sequence[TierSpec]
) -> bool:
    """Whether a worker's tiers hold its part of what rests there."""
    used = {DEVICE: 0, **{tier.name: 0 for tier in tiers}}
    used[spill] += spilled
    for i in place.order:
        for kind in _KINDS:
            tier = getattr(rests[i], kind)
            used[tier] += on_tier(place.sizes, kind, i, tier)
    return all(used[tier.name] <= tier.bytes for tier in tiers)


def with_rests(plan: Plan, rests: Sequence[Rest], spill: str) -> Plan:
    """The plan with these tiers; its stages that spill their activations do it to `spill`."""
    stages = tuple(
        replace(stage, rest=replace(rest, activations=spill if stage.spills else DEVICE))
        for stage, rest in zip(plan.stages, rests, strict=True)
    )
    return replace(plan, stages=stages)
