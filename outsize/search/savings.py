"""Savings: what each technique saves on the device and costs in time, one upon the other.

Every one is forecast like a plan to be run. All are exact: none changes a number that is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.search.candidates import candidates
from outsize.search.streamed import Search
from outsize.search.tiers import Passing, states
from outsize.search.ways import Predicts, Way, spilling, way_of
from outsize.simulate import Forecast

LIMITLESS = 1 << 60
NAMES = {
    "optimizer": "optimizer states below",
    "gradients": "gradients below",
    "parameters": "parameters below",
}


@dataclass(frozen=True)
class Saving:
    """One technique on top of those before. bytes: peak on the device; seconds: of a step; below:
    bytes on the tiers."""

    technique: str
    bytes: int
    seconds: float
    below: int


def savings(forecaster: Predicts, segments: int) -> list[Saving]:
    """From everything on the device to as little there as can be."""
    request = replace(forecaster.request, budget=LIMITLESS)
    plans = list(candidates(request, segments))
    found = [_saving(name, forecaster.forecast(plan)) for name, plan in _computed(plans)]
    if request.tiers:
        found += _streamed(forecaster, plans)
    return found


def _saving(name: str, made: Forecast) -> Saving:
    return Saving(name, made.peak, made.seconds, sum(made.below.values()))


def _whole(plan: Plan) -> bool:
    return all(stage.whole for stage in plan.stages[1:-1])


def _computed(plans: list[Plan]) -> Iterator[tuple[str, Plan]]:
    """How a step is computed with all states on the device."""
    first = plans[0]
    yield "everything on the device", first
    least = min(plan.microbatch_rows for plan in plans)
    if least < first.microbatch_rows:
        fewest = replace(first, microbatch_rows=least)
        yield f"microbatches of {least} row{'s' if least > 1 else ''}", fewest
    again = next((plan for plan in plans if _whole(plan)), None)
    if again is not None and not _whole(first):
        yield "blocks computed again", again


def _streamed(forecaster: Predicts, plans: list[Plan]) -> Iterator[Saving]:
    """States below, kind by kind, then activations, then the smallest way to compute."""
    last = forecaster.request.tiers[-1]
    tiers = (*forecaster.request.tiers[:-1], replace(last, bytes=LIMITLESS))
    search = Search(forecaster, states(forecaster.facts, plans[0]), LIMITLESS, tiers)
    again = next((plan for plan in plans if _whole(plan)), plans[-1])
    behind = forecaster.request.clip is None and again.mesh.pipeline == 1
    update: Literal["apart", "behind"] = "behind" if behind else "apart"
    by_layer = again.microbatches > 1 and again.mesh.pipeline == 1
    order: Literal["layer", "microbatch"] = "layer" if by_layer else "microbatch"
    way = way_of(forecaster, replace(again, order=order, update=update))
    yield from _down(search, way)
    spilt = way_of(forecaster, spilling(way.plan, last.name))
    helps = max(spilt.dynamic) < max(way.dynamic)
    if helps:
        yield _forecast(search, spilt, len(spilt.kinds), "activations below")
    small = replace(plans[-1], order=order, update=update)
    if helps:
        small = spilling(small, last.name)
    yield _forecast(search, way_of(forecaster, small), len(way.kinds), "sequence, logits in chunks")


def _down(search: Search, way: Way) -> Iterator[Saving]:
    """One kind of state after the other; which is first depends on when updates are made."""
    for kinds, kind in enumerate(way.kinds, start=1):
        yield _forecast(search, way, kinds, NAMES[kind])


def _forecast(search: Search, way: Way, kinds: int, name: str) -> Saving:
    """With the states of so many kinds below."""
    levels = [kinds * len(place.order) for place in way.places]
    choice = search.choice(way, levels, Passing(behind=way.behind))
    if choice is None:
        raise OutsizeError("tiers without limits are too small; this is a bug")
    return _saving(name, search.compose(search.plan(choice, pool=0), way))
