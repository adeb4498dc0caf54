"""What a pipeline plays that is said to be `auto`: a published schedule, or orders of its own.

Published schedules are ranked by the predicted seconds of the model's own blocks, the most
promising are forecast like any plan, and the quickest that fits is taken. The automatic scheduler
looks for orders beside them, for these seconds and for as many microbatches as the budget has room
for; they are a plan's like a schedule's name is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from math import inf

from outsize.errors import OutsizeError, counted
from outsize.plan import Pipelined, Plan
from outsize.plan.spread import AUTO
from outsize.schedule import Kind
from outsize.schedule.csv import to_csv
from outsize.schedule.pipelined import bounds_of, coarse_of
from outsize.schedule.pipelines import NAMES, Costs, Pipeline, Shape, pipeline
from outsize.search.candidates import candidates
from outsize.search.pipeline_cuts import PASSES, costs_of
from outsize.search.pipeline_scheduler import Ranked, computed, found_orders, ranked
from outsize.search.reorder import improved, split
from outsize.search.request import SCHEDULE
from outsize.search.variants import Predicts
from outsize.simulate import Forecast
from outsize.simulate.coarse import Times

FORECAST = 4  # schedules that are forecast beside SCHEDULE: a second each, of a deep model
WORTH = 0.99  # of SCHEDULE's time: what is quicker by less is not worth other sums and more memory
ALONE = ("zb-h1", "zb-h2")  # with a stage for each worker, shorter than SCHEDULE
BESIDE = "zb-h1"  # in SCHEDULE's memory, so that `auto` always knows it
_BELOW = 2  # schedules with states below, which are placed anew for each: seconds
_NEXT = 2  # candidates of a schedule that are forecast, from the first plan's way to compute on
_AGAIN = 2  # times that orders which miss the budget are found anew, for less
_DIGITS = 3  # of times in forwards of a worker: orders should not tell one rounding from another


def settled(
    forecaster: Predicts, segments: int, choose: Callable[[Predicts], Forecast]
) -> Forecast:
    """The quickest plan over the schedules. choose: the plan of one of them, or OutsizeError."""
    try:
        first = choose(forecaster)
    except OutsizeError as error:
        return _smaller(forecaster, segments, error)
    if first.below:
        found = [first, *_below(forecaster, first, choose)]
        best = min(found, key=lambda made: made.seconds)
        best = first if best.seconds > WORTH * first.seconds else best
        return _because(best, _why(best, first, len(found), 0))
    apart = _apart(forecaster, first)
    found = [first, *_others(forecaster, segments, first, apart)]
    count = len(found)
    found += _orders(forecaster, found, apart)
    best = min(found, key=lambda made: made.seconds)
    best = first if best.seconds > WORTH * first.seconds else best
    return _because(best, _why(best, first, count, len(found) - count))


def promising(made: Forecast, worth: float) -> list[str]:
    """Schedules with a stage for each worker that might take less than so much of the time of a
    plan of SCHEDULE, the shortest first."""
    every = {one.name: one.makespan for one in _ranks(made)}
    names = [name for name in ALONE if every.get(name, inf) < worth * every[SCHEDULE]]
    return sorted(names, key=every.__getitem__)


def fitting(forecaster: Predicts, plan: Plan) -> Forecast | None:
    """A plan's forecast; None where it does not fit the budget, or cannot be."""
    try:
        made = forecaster.forecast(plan)
        made.prove()
    except OutsizeError:  # conditions of a schedule, more stages than the model has
        return None
    budget = forecaster.request.budget
    return made if budget is None or made.peak <= budget else None


def _because(made: Forecast, why: str) -> Forecast:
    return replace(made, why=((made.plan.pipeline.schedule, why),))


def _why(best: Forecast, first: Forecast, named: int, own: int) -> str:
    """The choice in a line."""
    of = counted(named, "published schedule")
    of += f" and {own} orders of this plan's own" if own else ""
    if best is first:
        return f"of {of} none is predicted to be 1% quicker than {SCHEDULE} within the budget"
    less = 1 - best.seconds / first.seconds
    return f"the quickest of {of}: {less:.1%} less time than {SCHEDULE}, as predicted"


def _named(forecaster: Predicts, name: str) -> Pipelined:
    return replace(forecaster.request.schedule, schedule=name)


def _times(made: Forecast) -> Times:
    """Of a worker's part of a microbatch, in forwards of it."""
    forward, of_input, of_weight = made.plan.pipeline.costs
    hops = [e.end - e.start for e in made.trace.events if e.kind == Kind.RECV]

    def part(seconds: float) -> float:
        return round(seconds / forward, _DIGITS)

    return Times(1.0, part(of_input), part(of_weight), part(min(hops, default=0.0)))


def _ranks(made: Forecast) -> list[Ranked]:
    """The published schedules that the plan's microbatches allow, the shortest first. Those that
    hold every stage twice are left to be named: who has room for that has a data axis."""
    shape, times = Shape(made.plan.mesh.pipeline, made.plan.microbatches), _times(made)
    costs = replace(shape.costs, of_input=times.of_input, of_weight=times.of_weight)
    found = (ranked(name, replace(shape, costs=costs), times, None) for name in NAMES)
    kept = (one for one in found if one.played and len(one.played.pipeline.placement.routes) == 1)
    return sorted(kept, key=lambda one: (one.makespan, one.peak))


def _tried(forecaster: Predicts, segments: int, first: Forecast) -> int:
    """Which of the candidates the first plan is."""
    request = replace(forecaster.request, shards=first.plan.shards)
    for index, plan in enumerate(candidates(request, segments)):
        if replace(plan, pipeline=first.plan.pipeline) == first.plan:
            return index
    return 0


def _apart(forecaster: Predicts, first: Forecast) -> Forecast:
    """The plan with weight gradients apart, whose seconds are then known; itself where they cannot
    be apart."""
    return _forecast(forecaster, replace(first.plan, pipeline=_named(forecaster, BESIDE))) or first


def _others(
    forecaster: Predicts, segments: int, first: Forecast, apart: Forecast
) -> Iterator[Forecast]:
    """Plans of the most promising schedules that fit, computed as the first or a little tighter."""
    every, tried = _ranks(apart), _tried(forecaster, segments, first)
    own = next(one for one in every if one.name == SCHEDULE)
    names = [one.name for one in every if one.makespan < own.makespan][:FORECAST]
    for name in dict.fromkeys((BESIDE, *names)):
        if (made := _first(forecaster, name, segments, first.plan, tried, _NEXT)) is not None:
            yield made


def _below(
    forecaster: Predicts, first: Forecast, choose: Callable[[Predicts], Forecast]
) -> Iterator[Forecast]:
    """Plans of the most promising schedules, each with states below as it needs."""
    every = {one.name: one.makespan for one in _ranks(first)}
    names = [name for name in every if every[name] < WORTH * every[SCHEDULE]][:_BELOW]
    for name in dict.fromkeys((BESIDE, *names)):
        request = replace(forecaster.request, pipeline=_named(forecaster, name))
        try:
            made = choose(forecaster.asking(request))
            made.prove()
        except OutsizeError:  # conditions of the schedule, tiers too small for what it holds
            continue
        yield made


def _first(
    forecaster: Predicts, name: str, segments: int, plan: Plan, begin: int, count: int
) -> Forecast | None:
    """The first of so many candidates from `begin` on that fits, played in a schedule's order."""
    line = _named(forecaster, name)
    request = replace(forecaster.request, pipeline=line, shards=plan.shards)
    try:
        for candidate in islice(candidates(request, segments), begin, begin + count):
            made = forecaster.forecast(candidate)
            if request.budget is None or made.peak <= request.budget:
                return made
    except OutsizeError:  # conditions of the schedule, or more stages than the model has
        return None
    return None


def _smaller(forecaster: Predicts, segments: int, error: OutsizeError) -> Forecast:
    """A plan of the schedule that holds least, where SCHEDULE's does not fit."""
    request = forecaster.request
    every = list(candidates(request, segments))
    made = forecaster.forecast(every[0])
    least = min(_ranks(made), key=lambda one: one.peak).name
    fits = None if request.tiers else _first(forecaster, least, segments, every[0], 0, len(every))
    if fits is None:
        raise error
    return _because(fits, f"{least} holds least, and {SCHEDULE} does not fit")


# -- orders of the plan's own ----------------------------------------------------------------------


def with_orders(forecaster: Predicts, made: Forecast) -> Forecast:
    """A plan of SCHEDULE with the orders that are found for it, where they are quicker."""
    found = [made]
    if not made.below:
        found += _orders(forecaster, found, _apart(forecaster, made))
    best = min(found, key=lambda one: one.seconds)
    return _because(best, _why(best, made, 1, len(found) - 1))


def _orders(forecaster: Predicts, known: list[Forecast], apart: Forecast) -> list[Forecast]:
    """Plans with orders of their own that fit. known: the plans of schedules, in the first one's
    room: orders are found for the seconds of `apart`, and then improved, as those of the quickest
    schedule are, for the seconds of each stage."""
    first, budget = known[0], forecaster.request.budget
    room = _room(forecaster, first)

    def fitting(plans: Iterable[Plan]) -> list[Forecast]:
        found = (_forecast(forecaster, plan) for plan in plans)
        return [m for m in found if m is not None and (budget is None or m.peak <= budget)]

    for held in range(room, max(0, room - _AGAIN - 1), -1):
        found = fitting(_found(first.plan, apart, held))
        quickest = min(known, key=lambda made: made.seconds)
        found += fitting(_improved(made, held) for made in (quickest, *found))
        if found:
            return found
    return []


def _forecast(forecaster: Predicts, plan: Plan) -> Forecast | None:
    try:
        return forecaster.forecast(plan)
    except OutsizeError:  # more stages than the model has
        return None


def _room(forecaster: Predicts, first: Forecast) -> int:
    """Microbatches of its layers that every worker has room for."""
    workers, count = first.plan.mesh.pipeline, first.plan.microbatches
    if forecaster.request.budget is None:
        return count
    each, rooms = costs_of(first), []
    for worker, rank in enumerate(first.ranks):
        own = sum(each[stage].activations for stage in rank.stages)
        free = forecaster.request.budget - rank.peak
        rooms.append(min(workers - worker, count) + free // max(1, own))
    return max(1, min(count, *rooms))


def _found(plan: Plan, apart: Forecast, held: int) -> Iterator[Plan]:
    """The plan with the orders found for one stage a worker, and for two, its cuts open."""
    shape = Shape(plan.mesh.pipeline, plan.microbatches)
    starts = [one for one in _ranks(apart) if one.peak <= held]
    for made in found_orders(shape, _times(apart), held, starts):
        line = replace(plan.pipeline, schedule=AUTO, cuts=(), orders=_said(made))
        yield replace(plan, pipeline=line)


def _improved(made: Forecast, held: int) -> Plan:
    """The plan with its orders improved for the predicted seconds of its stages, as they are cut;
    gradients of weights are apart."""
    plan, line, times = made.plan, coarse_of(made.plan), _times(made)
    place = line.placement
    bounds, seconds = bounds_of(plan, place.stages), [0.0] * place.stages
    for event in made.trace.events:
        if event.kind in PASSES:
            seconds[bisect_right(bounds, event.stage) - 1] += event.end - event.start
    factors = [place.stages * each / sum(seconds) for each in seconds]
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer)
    orders = improved(place, split(computed(line)), costs, held, factors)
    said = _said(pipeline(AUTO, place, orders))
    return replace(plan, pipeline=replace(plan.pipeline, schedule=AUTO, orders=said))


def _said(made: Pipeline) -> tuple[str, ...]:
    return tuple(to_csv(made).split())
