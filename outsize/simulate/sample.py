"""A model's sample: one layer of each sort stands for all its like.

Layers that are described alike and computed alike cost alike. Rehearsing and timing one of each
makes planning a model of a hundred layers as quick as one of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outsize.models.config import DecoderConfig
from outsize.plan import Plan, Rest, Stage
from outsize.simulate.costs import PARTS, ActionCost, Costs, Facts, Moved


@dataclass(frozen=True)
class Sample:
    """The plan of a model with one layer of each sort, and for each segment of the whole model
    the segment there that stands for it."""

    config: DecoderConfig
    plan: Plan
    stands: tuple[int, ...]


def sample(config: DecoderConfig, plan: Plan, split: bool = False) -> Sample:
    """The smallest model that has every sort of layer, as the plan runs it. Where some
    parameters are frozen the first of a sort is apart: it may be the first that learns, whose
    backward pass ends there.

    split: weights' gradients may come apart from their inputs'. Then the first layer is apart: its
    input goes with them, while that of any other is the output of the layer before, which has it.
    And so it is where all are wired otherwise: there is nothing before it to be summed.
    Where some layers alone are wired otherwise, which they are goes by their places: all are there,
    as they are where an adapter's layer sees what each has taken.
    """
    how = {i: _computed(s) for s in plan.stages for i in range(s.first, s.last)}
    alike = [(layer, how[i], _shares(plan, i)) for i, layer in enumerate(config.layers, start=1)]
    frozen = config.adapter is not None or config.frozen or any(x.frozen for x in config.layers)
    firsts = {alike.index(sort) for sort in set(alike)} if frozen else set()
    wiring, places = config.wiring, range(len(alike))
    firsts |= {0} if split or wiring is not None else set()
    several = wiring is not None and len({wiring.width(i, 1) for i in places}) > 1
    if several or config.sided:
        sorts = [(*sort, i) for i, sort in enumerate(alike)]
    else:
        sorts = [(*sort, int(i in firsts)) for i, sort in enumerate(alike)]
    kinds = list(dict.fromkeys(sorts))
    ways = (how[0], *(way for _, way, _, _ in kinds), how[plan.segments - 1])
    stages = tuple(replace(way, first=i, last=i + 1) for i, way in enumerate(ways))
    settings = plan.settings.sharing(sum(shares != NOT for _, _, shares, _ in kinds))
    small = replace(plan, segments=len(stages), stages=stages, budget=None, settings=settings)
    stands = (0, *(kinds.index(sort) + 1 for sort in sorts), len(stages) - 1)
    return Sample(replace(config, layers=tuple(layer for layer, *_ in kinds)), small, stands)


NOT = (False, False, False)


def _shares(plan: Plan, block: int) -> tuple[bool, bool, bool]:
    """Of a block, counted from 1: whether it shares rows, and is the first and the last one that
    does, where layouts change."""
    return (True, block == 1, block == plan.by_rows) if block <= plan.by_rows else NOT


def _computed(stage: Stage) -> Stage:
    """What of a stage changes how it is computed."""
    return replace(stage, first=0, last=1, rest=Rest(activations=stage.rest.activations))


def expand(costs: Costs, chosen: Sample, plan: Plan, facts: Facts) -> Costs:
    """Costs of the whole model, whose facts are given, from those of its sample; `plan` has a
    stage a segment."""
    assert all(stage.last == stage.first + 1 for stage in plan.stages)
    actions, short = (_spread(some, chosen.stands) for some in (costs.actions, costs.short))
    last = len(chosen.stands) - 1
    names = ("prologue", *(f"block {i}" for i in range(last - 1)), "epilogue")
    forward = _spread(costs.forward, chosen.stands)
    return replace(
        costs, actions=actions, segments=names, facts=facts, short=short, forward=forward
    )


def _spread(costs: Mapping[Moved, ActionCost], stands: tuple[int, ...]) -> dict[Moved, ActionCost]:
    """Every segment's costs, those of the segment that stands for it."""
    ends = {key: cost for key, cost in costs.items() if key[2] == PARTS}
    return ends | {
        (kind, state, segment): cost
        for segment, place in enumerate(stands)
        for (kind, state, stage), cost in costs.items()
        if stage == place
    }
