"""The plan of somebody's own model where its states may rest on tiers: the same search as a native
decoder's, over rehearsals of the module itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outsize.hardware import Hardware
from outsize.optim import Optimizer
from outsize.plan import Plan
from outsize.search import PlanRequest
from outsize.search.request import memories
from outsize.search.streamed import choose_streamed
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs, Facts
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import bare


@dataclass
class Rehearsals:
    """Forecasts of one module's plans; those that differ only in where states rest share one
    rehearsal. rehearsed: one, of a plan with every state on the device."""

    request: PlanRequest
    hardware: Hardware
    rehearsed: Callable[[Plan], Costs]
    _known: dict[Plan, Costs] = field(default_factory=dict)
    _facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        assert self._facts is not None, "a plan is rehearsed before anything else is asked"
        return self._facts

    def costs(self, plan: Plan) -> list[Costs]:
        """Costs of a plan's actions: a list of one."""
        key = bare(plan)
        if key not in self._known:
            made = self.rehearsed(plan)
            self._facts = replace(made.facts, host=memories(self.request))
            self._known[key] = replace(made, facts=self._facts)
        return [self._known[key]]

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan holds and takes."""
        return compose(plan, self.costs(plan)[0], self.hardware)


def choose_tiered(
    plans: Sequence[Plan],
    request: PlanRequest,
    hardware: Hardware,
    rehearsed: Callable[[Plan], Costs],
) -> Forecast:
    """The quickest way to compute one of the plans with states below that fits request.budget.
    OutsizeError where none does, with what is missing."""
    forecaster = Rehearsals(request, hardware, rehearsed)
    forecaster.costs(plans[0])
    return choose_streamed(forecaster, plans)


def request_of(plan: Plan, optimizer: Optimizer, clip: float | None) -> PlanRequest:
    """What a plan fixes already."""
    return PlanRequest(
        plan.rows, plan.sequence, plan.precision, optimizer, clip, plan.budget,
        approximate=plan.approximate,
    )  # fmt: skip
