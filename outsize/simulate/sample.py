"""A model's sample: one layer of each sort stands for all its like.

Layers that are described alike and computed alike cost alike. Rehearsing and timing one of each
makes planning a model of a hundred layers as quick as one of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outsize.models.config import DecoderConfig
from outsize.plan import Plan, Stage
from outsize.schedule import Kind
from outsize.simulate.rehearse import ActionCost, Costs


@dataclass(frozen=True)
class Sample:
    """The plan of a model with one layer of each sort, and for each segment of the whole model
    the segment there that stands for it."""

    config: DecoderConfig
    plan: Plan
    stands: tuple[int, ...]


def sample(config: DecoderConfig, plan: Plan) -> Sample:
    """The smallest model that has every sort of layer, as the plan runs it."""
    recompute = {i: s.recompute for s in plan.stages for i in range(s.first, s.last)}
    sorts = [(layer, recompute[i]) for i, layer in enumerate(config.layers, start=1)]
    kinds = list(dict.fromkeys(sorts))
    stages = (
        Stage(0, 1),
        *(Stage(i, i + 1, again) for i, (_, again) in enumerate(kinds, start=1)),
        Stage(len(kinds) + 1, len(kinds) + 2),
    )
    small = replace(plan, segments=len(stages), stages=stages, budget=None)
    stands = (0, *(kinds.index(sort) + 1 for sort in sorts), len(stages) - 1)
    return Sample(replace(config, layers=tuple(layer for layer, _ in kinds)), small, stands)


def expand(costs: Costs, chosen: Sample, plan: Plan) -> Costs:
    """Costs of the whole model from those of its sample; `plan` has a stage a segment."""
    assert all(stage.last == stage.first + 1 for stage in plan.stages)
    actions: dict[tuple[Kind, int], ActionCost] = {}
    for segment, place in enumerate(chosen.stands):
        for (kind, stage), cost in costs.actions.items():
            if stage == place:
                actions[kind, segment] = cost
    last = len(chosen.stands) - 1
    names = ["prologue", *(f"block {i}" for i in range(last - 1)), "epilogue"]
    segments = tuple(
        (name, costs.segments[place][1]) for name, place in zip(names, chosen.stands, strict=True)
    )
    static = {name: n for name, n in costs.static.items() if name == "data"}
    for _, held in segments:
        for name, count in held.items():
            static[name] = static.get(name, 0) + count
    return Costs(static, actions, segments)
