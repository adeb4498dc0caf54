"""Savings: what each technique saves on the device and costs in time, one upon the other.

Every one is forecast like a plan to be run. All are exact: none changes a number that is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from outsize.errors import OutsizeError
from outsize.plan import Plan, Rest, Stream
from outsize.plan.approximate import clash
from outsize.search.candidates import candidates
from outsize.search.offload import Search
from outsize.search.tiers import Passing, states
from outsize.search.variants import Predicts, Variant, spilling, variant_of
from outsize.simulate import Forecast

LIMITLESS = 1 << 60
NAMES = {
    "optimizer": "optimizer states below",
    "gradients": "gradients below",
    "parameters": "parameters below",
}


@dataclass(frozen=True)
class Tradeoff:
    """One technique on top of those before. bytes: peak on the device; seconds: of a step; below:
    bytes on the tiers."""

    technique: str
    bytes: int
    seconds: float
    below: int


def tradeoffs(forecaster: Predicts, segments: int) -> list[Tradeoff]:
    """From everything on the device to as little there as can be."""
    request = replace(forecaster.request, budget=LIMITLESS)
    plans = list(candidates(request, segments))
    found = [_tradeoff(name, forecaster.forecast(plan)) for name, plan in _computed(plans)]
    if request.tiers and not _stays(plans[0], request.tiers[0].name, request.approximate):
        found += _streamed(forecaster, plans)
    return found


def _stays(plan: Plan, tier: str, approximate: Iterable[str]) -> bool:
    """Whether a technique keeps on the device what could rest below: beside workers who share the
    weights that is the optimizer's states."""
    rest = Rest(tier) if plan.shards.optimizer == 1 else Rest(optimizer=tier)
    stages = tuple(replace(stage, rest=rest) for stage in plan.stages)
    under = replace(plan, approximate=(), stages=stages, stream=Stream())
    return clash(under, approximate) is not None


def _tradeoff(name: str, made: Forecast) -> Tradeoff:
    return Tradeoff(name, made.peak, made.seconds, sum(made.below.values()))


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


def _streamed(forecaster: Predicts, plans: list[Plan]) -> Iterator[Tradeoff]:
    """States below, kind by kind, then activations, then the smallest variant to compute."""
    last = forecaster.request.tiers[-1]
    tiers = (*forecaster.request.tiers[:-1], replace(last, bytes=LIMITLESS))
    search = Search(forecaster, states(forecaster.facts, plans[0]), LIMITLESS, tiers)
    again = next((plan for plan in plans if _whole(plan)), plans[-1])
    behind = forecaster.request.behind and again.mesh.pipeline == 1
    update: Literal["apart", "behind"] = "behind" if behind else "apart"
    by_layer = again.microbatches > 1 and again.mesh.pipeline == 1
    order: Literal["layer", "microbatch"] = "layer" if by_layer else "microbatch"
    variant = variant_of(forecaster, replace(again, order=order, update=update))
    yield from _down(search, variant)
    spilt = variant_of(forecaster, spilling(variant.plan, last.name))
    helps = max(spilt.dynamic) < max(variant.dynamic)
    if helps:
        yield _forecast(search, spilt, len(spilt.kinds), "activations below")
    small = replace(plans[-1], order=order, update=update)
    if helps:
        small = spilling(small, last.name)
    yield _forecast(
        search, variant_of(forecaster, small), len(variant.kinds), "sequence, logits in chunks"
    )


def _down(search: Search, variant: Variant) -> Iterator[Tradeoff]:
    """One kind of state after the other; which is first depends on when updates are made."""
    for kinds, kind in enumerate(variant.kinds, start=1):
        yield _forecast(search, variant, kinds, NAMES[kind])


def _forecast(search: Search, variant: Variant, kinds: int, name: str) -> Tradeoff:
    """With the states of so many kinds below."""
    levels = [kinds * len(place.order) for place in variant.places]
    choice = search.choice(variant, levels, Passing(behind=variant.behind))
    if choice is None:
        raise OutsizeError("tiers without limits are too small; this is a bug")
    return _tradeoff(name, search.compose(search.plan(choice, pool=0), variant))
