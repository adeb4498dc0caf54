"""Plans whose activations leave as a simulated pipeline's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outsize.plan import Plan
from outsize.schedule.pipelines.offloaded import MOVED, Offloaded
from outsize.schedule.pipelines.pipeline import Pipeline


def bare(made: Pipeline) -> Pipeline:
    """The pipeline without the moves of activations."""
    workers = tuple(
        tuple(a for a in actions if a.kind not in MOVED) for actions in made.schedule.workers
    )
    return replace(made, schedule=replace(made.schedule, workers=workers))


def spills(made: Offloaded, bounds: Sequence[int]) -> tuple[frozenset[int], ...]:
    """By worker, the plan's stages whose `rest.activations` is the host. bounds: the plan's stages
    at which the pipeline's begin, and their end; the first ones of a stage go, for they wait
    longest for their gradients."""
    found: list[set[int]] = [set() for _ in made.pipeline.schedule.workers]
    for (worker, stage), part in made.parts.items():
        first, last = bounds[stage], bounds[stage + 1]
        found[worker].update(range(first, first + round(part * (last - first))))
    return tuple(map(frozenset, found))


def with_spills(plan: Plan, made: Offloaded, bounds: Sequence[int], tier: str = "host") -> Plan:
    """The plan with the activations of these stages on a tier. A stage of the plan that two
    workers play rests there on both."""
    away = frozenset[int]().union(*spills(made, bounds))
    stages = tuple(
        replace(stage, rest=replace(stage.rest, activations=tier)) if i in away else stage
        for i, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)
