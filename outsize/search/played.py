"""Plans whose steps a technique makes otherwise: they are predicted by playing all of a step on
fake tensors (outsize/simulate/playing.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from outsize.hardware import Hardware
from outsize.models.config import DecoderConfig
from outsize.plan import Plan, Rest, Sharding, Stream, zero
from outsize.plan.approximate import clash
from outsize.plan.plan import per_segment
from outsize.runtime.method import method_of
from outsize.search.candidates import candidates
from outsize.search.request import PlanRequest, layouts, native_makers
from outsize.simulate import Forecast
from outsize.simulate.playing import predicted


def predict(
    config: DecoderConfig, request: PlanRequest, plan: Plan, hardware: Hardware
) -> Forecast:
    """The forecast of a plan, with the costliest layout of documents."""
    makers = (partial(native_makers, config, request, bounds) for bounds in layouts(request))
    made = (predicted(plan, one, hardware, request.filling, request.ledger) for one in makers)
    return max(made, key=lambda one: one.peak)


def plans(request: PlanRequest, segments: int) -> Iterator[Plan]:
    """Candidates, quickest first. Where memory is bounded and weights may rest below, the first of
    all is followed by those with more and more of them there."""
    names, method = request.approximate, method_of(request.approximate)
    bare = replace(request, approximate=(), settings=request.settings.closed)
    bare = replace(bare, shards=_shards(bare, segments, names))
    again = replace(next(candidates(bare, segments)), stages=per_segment(segments, ("block",)))
    if bare.recompute is None and clash(again, names):
        bare = replace(bare, recompute=())
    found = list(candidates(bare, segments))
    tiers = request.tiers if request.budget is not None else ()
    resting = [
        _below(p, tier.name, count) for tier in tiers[:1] for p in found for count in _counts(p)
    ]
    if resting and not clash(resting[0], names):
        found = [found[0], *resting]
    for plan in found:
        yield method.planned(replace(plan, approximate=names), request.recipe)


def _shards(request: PlanRequest, segments: int, names: Iterable[str]) -> Sharding:
    """What the data axis cuts: as said, or the first of ZeRO's stages from 1 on that the technique
    goes with where memory is bounded, from none on where it is not."""
    data = request.mesh.data
    if request.shards is not None or data == 1:
        return request.shards or Sharding()
    stages = (0, 1, 2, 3) if request.budget is None else (1, 2, 3, 0)
    for shards in (zero(stage, data) for stage in stages):
        made = next(candidates(replace(request, shards=shards), segments))
        if not clash(made, names):
            return shards
    return Sharding()


def _counts(plan: Plan) -> list[int]:
    """How many blocks' weights rest below: some, more, then all and the ends."""
    blocks = len(plan.stages) - 2
    graded = {-(-blocks * quarter // 4) for quarter in range(1, 5)}
    return [*sorted(n for n in graded if n > 1), len(plan.stages)]


def _below(plan: Plan, tier: str, count: int) -> Plan:
    """The plan with weights of the last so many blocks, or of all stages, on a tier."""
    last = len(plan.stages) - 1
    first = 0 if count > last else last - count
    stages = tuple(
        replace(s, rest=Rest(tier)) if count > last or first <= i < last else s
        for i, s in enumerate(plan.stages)
    )
    return replace(plan, stages=stages, stream=Stream())
