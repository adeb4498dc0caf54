"""The ways to compute a step with states below: orders, updates, activations here or below, cuts of
a pipeline; and what each holds and takes with all states on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from outsize.hardware import Hardware
from outsize.plan import Plan, Rest
from outsize.search.pipeline_cuts import with_cuts
from outsize.search.request import PlanRequest
from outsize.search.tiers import APART, BEHIND, OPTIMIZER, Passing
from outsize.search.worker_states import WorkerCosts, WorkerStates, worker_costs, worker_states
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs, Facts
from outsize.simulate.forecast import compose


class Predicts(Protocol):
    """What is asked for forecasts: a native decoder's `Forecaster`, or rehearsals of a module."""

    @property
    def request(self) -> PlanRequest: ...

    @property
    def hardware(self) -> Hardware: ...

    @property
    def facts(self) -> Facts: ...

    def asking(self, request: PlanRequest) -> Predicts:
        """The same of another schedule."""

    def costs(self, plan: Plan) -> list[Costs]:
        """Of a plan's actions, for each layout of a batch."""

    def forecast(self, plan: Plan) -> Forecast:
        """With the costliest of the layouts."""


@dataclass(frozen=True)
class Variant:
    """How a step is computed, whatever its states do.

    plan: its states on the device, stages that spill marked. places: its workers; the following
    are one entry each. dynamic: bytes beyond states, at most. passes, updates: seconds. spilled:
    bytes of activations on their tier. waits: seconds of a step in which the busiest worker has
    nothing to do but wait for others. layout: which of the request's layouts holds most.
    """

    plan: Plan
    places: tuple[WorkerStates, ...]
    dynamic: tuple[int, ...]
    passes: tuple[float, ...]
    updates: tuple[float, ...]
    spilled: tuple[int, ...]
    waits: float
    layout: int

    @property
    def behind(self) -> bool:
        return self.plan.update == "behind"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of states that may rest below, in the order in which they go."""
        if self.plan.mesh.summed:  # each worker its share: ZeRO-Offload and ZeRO-Infinity
            cut = self.plan.shards.optimizer > 1
            return tuple(
                k for k in APART if k == OPTIMIZER or (cut and self.plan.may_rest_below(k))
            )
        return BEHIND if self.behind else APART

    @property
    def levels(self) -> tuple[int, ...]:
        """By worker, the last level of what rests below."""
        return tuple(len(self.kinds) * len(place.order) for place in self.places)

    @property
    def seconds(self) -> float:
        """Of a step where nothing moves."""
        return self.waits + max(map(sum, zip(self.passes, self.updates, strict=True)))

    def held(self, place: int, level: int, passing: Passing) -> int:
        """About the peak of a worker at a level."""
        mine = self.places[place]
        return self.dynamic[place] + mine.held(mine.below(level, self.kinds), passing)

    def peak(self, levels: Sequence[int], passing: Passing) -> int:
        """About that of the worker with the highest."""
        return max(self.held(place, level, passing) for place, level in enumerate(levels))


def variant_of(forecaster: Predicts, plan: Plan) -> Variant:
    """What a plan's computation holds and takes."""
    costs = forecaster.costs(plan)
    if plan.mesh.pipeline > 1 and not plan.pipeline.cuts:
        plan = with_cuts(plan, costs[0], forecaster.hardware, below=True)
    made = [compose(plan, one, forecaster.hardware) for one in costs]
    layout = max(range(len(made)), key=lambda i: made[i].peak)
    found = [worker_costs(one) for one in made]
    top = found[layout]
    busiest = max(one.passes + one.updates for one in top)
    return Variant(
        plan,
        worker_states(forecaster.facts, plan),
        tuple(map(_dynamic, zip(*found, strict=True))),
        tuple(one.passes for one in top),
        tuple(one.updates for one in top),
        tuple(one.below for one in top),  # nothing else is below yet
        made[layout].seconds - busiest if len(top) > 1 or plan.mesh.summed else 0.0,
        layout,
    )


def _dynamic(layouts: Sequence[WorkerCosts]) -> int:
    return max(one.peak - one.resident for one in layouts)


def variants(forecaster: Predicts, plan: Plan) -> Iterator[Plan]:
    """A candidate in each order, with updates apart or behind, its activations here or below; of a
    pipeline, whose schedule says the order, with the cuts that it may have."""
    if plan.mesh.pipeline > 1:
        for cut in _cut(forecaster, plan):
            yield from _here_or_below(forecaster.request, cut)
        return
    request = forecaster.request
    orders: tuple[Literal["layer", "microbatch"], ...]
    orders = ("layer", "microbatch") if plan.microbatches > 1 else ("layer",)
    orders = orders if request.order is None else (request.order,)
    for order in orders:
        for made in _here_or_below(request, replace(plan, order=order)):
            if request.behind:
                yield replace(made, update="behind")
            if not request.behind or any(tier.medium == "memory" for tier in request.tiers):
                yield made


def _here_or_below(request: PlanRequest, plan: Plan) -> Iterator[Plan]:
    """The plan, and with the activations of all stages on a tier."""
    yield plan
    whole = [stage.whole for stage in plan.stages[1:-1]]
    if all(whole) or not any(whole):
        yield spilling(plan, request.tiers[0].name)


def _cut(forecaster: Predicts, plan: Plan) -> list[Plan]:
    """With cuts that fit the budget with all states on the device, and with those that balance
    times where states make room."""
    if plan.pipeline.cuts:
        return [plan]
    costs = forecaster.costs(plan)[0]
    limited = replace(plan, budget=forecaster.request.budget)
    made = (with_cuts(limited, costs, forecaster.hardware, below) for below in (False, True))
    return list(dict.fromkeys(made))


def spilling(plan: Plan, tier: str) -> Plan:
    """The plan with the activations of all its stages on a tier."""
    stages = (replace(stage, rest=Rest(activations=tier)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))
