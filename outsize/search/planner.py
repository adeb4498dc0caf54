"""Choosing the plan of one device: the quickest candidate that fits the budget.

Each candidate is forecast, and the first in order of predicted time that fits is taken; where
states may rest on tiers below the device, outsize/search/offload.py weighs them instead. Workers
of a data axis cut optimizer states alone as long as that fits, and gradients and parameters too
where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from outsize.errors import OutsizeError, counted
from outsize.hardware import Hardware
from outsize.memory import format_bytes
from outsize.models.config import DecoderConfig
from outsize.plan import Plan, Sharding, zero
from outsize.runtime.method import method_of
from outsize.search import played
from outsize.search.candidates import candidates
from outsize.search.choices import weighed
from outsize.search.offload import choose_offloaded
from outsize.search.pipeline_cuts import composed
from outsize.search.request import (
    Forecaster,
    PlanRequest,
    facts_of_model,
    known_of,
    layouts,
    native_makers,
)
from outsize.search.schedules import settled, with_orders
from outsize.search.variants import Predicts
from outsize.simulate import Forecast
from outsize.simulate.rehearse import rehearse

WORTH = 0.98  # of a step's time: what is quicker by less is not worth the memory of larger pieces


class TooSmall(OutsizeError):
    """No plan fits the budget."""


def choose(config: DecoderConfig, request: PlanRequest, hardware: Hardware) -> Forecast:
    """The quickest plan for a native decoder that fits request.budget.

    Raises OutsizeError where none fits, with the missing bytes and the nearest that does.
    """
    segments = len(config.layers) + 2
    if not method_of(request.approximate).rehearsed:
        every = played.plans(request, segments)
        one = [list(every)]
        return pick(one, lambda plan: predict(config, request, plan, hardware), request.budget)

    def of(asked: PlanRequest) -> Forecaster:
        return forecaster_of(config, asked, hardware)

    return weighed(of, request, partial(chosen, segments=segments))


def chosen(forecaster: Predicts, segments: int) -> Forecast:
    """The quickest plan of a model of so many segments that fits the request's budget."""
    request = forecaster.request
    if request.searched and request.mesh.pipeline > 1:
        return settled(forecaster, segments, partial(_chosen, segments=segments))
    return _chosen(forecaster, segments)


def _chosen(forecaster: Predicts, segments: int) -> Forecast:
    """The same, with the schedule that is said or the search begins with."""
    request = _widened(forecaster, segments)
    ways = (list(candidates(replace(request, shards=s), segments)) for s in _shardings(request))
    if request.tiers and request.budget is not None:
        return choose_offloaded(forecaster, *ways)
    return pick(ways, forecaster.forecast, request.budget)


def _widened(forecaster: Predicts, segments: int) -> PlanRequest:
    """The request with more tokens at once, and logits of more of them, while that gains something
    and fits. To hand work to a device with queues takes the host as long whatever its size, so a
    step that waits for the host is the shorter the fewer its microbatches and chunks are."""
    request = forecaster.request
    if not request.apart or request.mesh.pipeline > 1:
        return request
    best, limit = forecaster.forecast(next(candidates(request, segments))), request.budget
    if limit is not None and best.peak > limit:
        return request
    for grown in (_more_rows, _more_logits):
        while (plan := next(candidates(more := grown(request, best.plan), segments))) != best.plan:
            made = forecaster.forecast(plan)
            if made.seconds > WORTH * best.seconds or (limit is not None and made.peak > limit):
                break
            request, best = more, made
    return request


def _more_rows(request: PlanRequest, plan: Plan) -> PlanRequest:
    return replace(request, at_once=2 * plan.microbatch_rows * plan.sequence)


def _more_logits(request: PlanRequest, plan: Plan) -> PlanRequest:
    most = plan.microbatch_rows * plan.sequence
    return request if request.logits >= most else replace(request, logits=2 * request.logits)


def _shardings(request: PlanRequest) -> tuple[Sharding, ...]:
    """What the data axis may cut, from what sends least to what holds least: ZeRO's stages."""
    if request.shards is not None or request.mesh.data == 1:
        return (request.shards or Sharding(),)
    return tuple(zero(stage, request.mesh.data) for stage in (1, 2, 3))


def forecaster_of(config: DecoderConfig, request: PlanRequest, hardware: Hardware) -> Forecaster:
    """What predicts plans of a native decoder."""
    return Forecaster(config, request, hardware, facts_of_model(config, request))


def replayed(
    config: DecoderConfig, request: PlanRequest, plan: Plan, hardware: Hardware
) -> Forecast:
    """As `predict`, of a plan that goes on on another mesh: where orders of its own are asked for,
    with those that are found for it."""
    made = predict(config, request, plan, hardware)
    if not request.searched or plan.mesh.pipeline == 1 or plan.pipeline.cuts:
        return made
    return with_orders(forecaster_of(config, request, hardware), made)


def predict(
    config: DecoderConfig, request: PlanRequest, plan: Plan, hardware: Hardware
) -> Forecast:
    """The forecast of a given plan for a native decoder, with the costliest of `layouts`."""
    if not method_of(plan.approximate).rehearsed:
        return played.predict(config, request, plan, hardware)
    asked = replace(
        request, mesh=plan.mesh, sequence_parallel=plan.sequence_parallel, pipeline=plan.pipeline,
        approximate=plan.approximate, settings=plan.settings,
    )  # fmt: skip
    if all(stage.last == stage.first + 1 for stage in plan.stages):
        return forecaster_of(config, asked, hardware).forecast(plan)
    found = []
    for bounds in layouts(request):
        makers = native_makers(config, request, bounds)
        apart = hardware.devices[0].apart
        costs = rehearse(plan, *makers, ledger_of=request.ledger, apart=apart)
        facts = known_of(request, costs.facts)
        found.append(replace(costs, facts=facts))
    return composed(plan, found, hardware)


def pick(
    ways: Iterable[list[Plan]], predict: Callable[[Plan], Forecast], budget: int | None
) -> Forecast:
    """Of the first that fits of each way's candidates, which come in order of rising time, the
    quickest; where the very first of all fits, nothing else is looked at."""
    found: list[Forecast] = []
    smallest: list[Forecast] = []
    for number, plans in enumerate(ways):
        fits, least = _first(plans, predict, budget)
        smallest.append(least)
        if fits is not None:
            found.append(fits)
            if number == 0 and fits.plan == plans[0]:
                break
    if not found:
        assert budget is not None
        raise _too_small(min(smallest, key=lambda one: one.peak), budget)
    return min(found, key=lambda one: one.seconds)


def _first(
    candidates: Iterable[Plan], predict: Callable[[Plan], Forecast], budget: int | None
) -> tuple[Forecast | None, Forecast]:
    """The first forecast that fits, and the smallest of those before it (or it)."""
    smallest: Forecast | None = None
    for plan in candidates:
        made = predict(plan)
        if budget is None or made.peak <= budget:
            return made, made
        if smallest is None or made.peak < smallest.peak:
            smallest = made
    assert smallest is not None
    return None, smallest


def _too_small(smallest: Forecast, budget: int) -> TooSmall:
    return TooSmall(
        f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
        f" {counted(smallest.peak - budget, 'byte')} missing; the smallest plan needs"
        f" {format_bytes(smallest.peak)} ({smallest.peak} bytes,"
        f" {format_bytes(sum(smallest.static.values()))} of them parameters, gradients and"
        f" optimizer): set memory to {-(-smallest.peak // 2**20)}MiB, or use a smaller model"
    )
