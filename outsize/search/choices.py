"""What else a planner chooses where nobody has said: whether tokens between branches are cut over
the tensor axis, settings of techniques that leave it their values, the schedule of a pipeline.

Each is weighed by the predicted seconds of a step within the budget, one after the other, as a
change of the plan before: one more forecast each. What is exact is taken where it is quicker by
more than a forecast errs by, or where nothing fits without it; what a user has named under
`approximate` is taken where it gains at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.plan.settings import PLAN_SETTINGS, PlanSetting
from outsize.search.candidates import candidates
from outsize.search.request import SCHEDULE, PlanRequest
from outsize.search.schedules import fitting, promising
from outsize.search.variants import Predicts
from outsize.simulate import Forecast

WORTH = 0.95  # of a step's time: what is quicker by less is within what a forecast errs by
TOKENS = 256  # at once: with fewer a step is calls and messages, and no cut of them is shorter
BETWEEN = "sequence_parallel"

Choose = Callable[[Predicts], Forecast]


def weighed(
    of: Callable[[PlanRequest], Predicts], request: PlanRequest, choose: Choose
) -> Forecast:
    """The quickest plan over what is open. of: what predicts plans of a request; choose: the plan
    of a request with nothing of that open, or OutsizeError."""
    closed = replace(request, sequence_parallel=bool(request.sequence_parallel))
    forecaster = of(closed)
    if request.sequence_parallel is None and request.mesh.tensor > 1:
        wide = of(replace(request, sequence_parallel=True))
        forecaster, made = _cut_between(forecaster, wide, choose)
    else:
        made = choose(forecaster)
    for one in _open(request):
        forecaster, made = _set(of, forecaster, made, one)
    if request.pipeline is None and request.mesh.pipeline > 1 and not made.below:
        made = _scheduled(forecaster, made)
    return made


def _because(made: Forecast, what: str, reason: str) -> Forecast:
    return replace(made, why=(*made.why, (what, reason)))


def _less(one: Forecast, other: Forecast) -> str:
    """How the time of one step compares with another's, in words."""
    part = one.seconds / other.seconds - 1
    return f"{abs(part):.1%} {'less' if part <= 0 else 'more'} time"


# -- tokens between branches -----------------------------------------------------------------------


def _cut_between(plain: Predicts, wide: Predicts, choose: Choose) -> tuple[Predicts, Forecast]:
    """The plan with whole tokens between branches or with cut ones, and what predicts it."""
    try:
        first = choose(plain)
    except OutsizeError as error:
        try:
            made = choose(wide)
        except OutsizeError:
            raise error from None
        return wide, _because(made, BETWEEN, "no plan fits without it")
    other = _wide(plain, wide, first, choose)
    if other is None:
        return plain, first
    said = f"{_less(other, first)} than without, as predicted"
    if other.seconds < WORTH * first.seconds:
        return wide, _because(other, BETWEEN, said)
    return plain, _because(first, f"no {BETWEEN}", f"it would take {said}")


def _wide(plain: Predicts, wide: Predicts, first: Forecast, choose: Choose) -> Forecast | None:
    """The same plan with cut tokens where it has all the room that it wants; else what these make
    room for. None where that cannot be, or would gain nothing."""
    if _roomy(plain.request, first):
        if first.plan.microbatch_size * first.plan.sequence < TOKENS:
            return None
        return fitting(wide, replace(first.plan, sequence_parallel=True))
    try:
        return choose(wide)
    except OutsizeError:
        return None


def _roomy(request: PlanRequest, made: Forecast) -> bool:
    """Whether the budget has changed nothing of a plan."""
    if request.budget is None:
        return True
    plan = made.plan
    best = next(candidates(replace(request, shards=plan.shards), plan.segments))
    return not made.below and replace(best, pipeline=plan.pipeline) == plan


# -- settings of techniques ------------------------------------------------------------------------


def _open(request: PlanRequest) -> Iterator[PlanSetting]:
    """Those that are weighed and that nobody has said."""
    for name, one in PLAN_SETTINGS.items():
        if one.quicker is not None and request.settings.get(name) is None:
            yield one


def _set(
    of: Callable[[PlanRequest], Predicts], forecaster: Predicts, first: Forecast, one: PlanSetting
) -> tuple[Predicts, Forecast]:
    """The plan with the first value of a setting that fits, where that makes it quicker; and what
    predicts it."""
    found = _first_fitting(of, forecaster, first, one)
    if found is None:
        return forecaster, first
    value, other, best = found
    worth = 1.0 if one.approximate else one.worth or WORTH
    if best.seconds < worth * first.seconds:
        said = f"{_less(best, first)} than where it is not set, as predicted"
        return other, _because(replace(best, why=first.why), f"{one.name} {value}", said)
    reason = f"{value} would take {_less(best, first)}, as predicted"
    name = f"no {one.name}" if not one.approximate else one.name
    return forecaster, _because(first, name, reason)


def _first_fitting(
    of: Callable[[PlanRequest], Predicts], forecaster: Predicts, first: Forecast, one: PlanSetting
) -> tuple[int, Predicts, Forecast] | None:
    """A value, what predicts plans with it, and the plan; None where none can be or fits."""
    assert one.quicker is not None
    for value in one.quicker(first.plan):
        plan = _having(first.plan, one, value)
        if plan is None:
            continue
        other = _predicting(of, forecaster, one, value)
        if other is not None and (made := fitting(other, plan)):
            return value, other, made
    return None


def _predicting(
    of: Callable[[PlanRequest], Predicts], forecaster: Predicts, one: PlanSetting, value: int
) -> Predicts | None:
    """What predicts plans with a value: another where parameters lie otherwise by it, None where
    the model's cannot."""
    if not one.by_rows:
        return forecaster
    request = forecaster.request
    try:
        return of(replace(request, settings=request.settings.having({one.name: value})))
    except OutsizeError:
        return None


def _having(plan: Plan, one: PlanSetting, value: int) -> Plan | None:
    return _replaced(plan, settings=plan.settings.having({one.name: value}))


def _replaced(plan: Plan, **changes: Any) -> Plan | None:
    """A plan with something else in it; None where that does not go with the rest."""
    try:
        return replace(plan, **changes)
    except OutsizeError:
        return None


# -- the schedule ----------------------------------------------------------------------------------


def _scheduled(forecaster: Predicts, first: Forecast) -> Forecast:
    """The plan in the order of the schedule that makes it quickest, of those with a stage for each
    worker."""
    names = promising(first, WORTH)
    lines = (replace(first.plan.pipeline, schedule=name, cuts=()) for name in names)
    plans = [_replaced(first.plan, pipeline=line) for line in lines]
    found = [fitting(forecaster, plan) for plan in plans if plan is not None]
    best = min((made for made in found if made), key=lambda made: made.seconds, default=None)
    if best is None:
        return first
    name = best.plan.pipeline.schedule
    if best.seconds < WORTH * first.seconds:
        said = f"{_less(best, first)} than {SCHEDULE}, as predicted"
        return _because(replace(best, why=first.why), name, said)
    return _because(first, SCHEDULE, f"{name} would take {_less(best, first)}, as predicted")
