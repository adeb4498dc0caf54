"""What of a pipeline follows from the costs of its stages: where they begin, and the seconds for
which its schedule is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, log10

from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.plan import Plan
from outsize.schedule import Kind
from outsize.schedule.chunks import LINE
from outsize.schedule.ends import Ends, ends_of
from outsize.schedule.pipelined import coarse_of
from outsize.schedule.starting import of_chunk
from outsize.search.branch_and_bound import Cost
from outsize.search.partition import in_flight, partition, tightest
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import splits_of, stacked

_DIGITS = 3  # of seconds that a schedule is made for
PASSES = (
    Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)  # fmt: skip
_KEPT, _PASSING = "activations", "workspace"  # of a segment's bytes: by microbatch, not static


def composed(plan: Plan, costs: Sequence[Costs], hardware: Hardware) -> Forecast:
    """The forecast of a plan with the costliest of some costs. A pipeline's cuts, where the plan
    leaves them open, are settled before, by the first of them; those that hold least where the
    others turn out not to fit its budget."""

    def costliest(plan: Plan) -> Forecast:
        return max((compose(plan, one, hardware) for one in costs), key=lambda made: made.peak)

    if plan.mesh.pipeline == 1 or plan.pipeline.cuts:
        return costliest(plan)
    made = costliest(with_cuts(plan, costs[0], hardware))
    if plan.budget is None or made.peak <= plan.budget:
        return made
    least = with_cuts(plan, costs[0], hardware, least=True)
    if least.pipeline.cuts == made.plan.pipeline.cuts:
        return made
    return min(made, costliest(least), key=lambda made: made.peak)


def with_cuts(
    plan: Plan, costs: Costs, hardware: Hardware, below: bool = False, least: bool = False
) -> Plan:
    """The plan with cuts that balance the workers within its budget, and the seconds of its stages.
    Where no cuts seem to fit, the balanced ones are taken: a forecast says what is missing. below:
    states may rest below the device, so that activations alone must fit. least: with the cuts that
    hold least, whatever the times."""
    alone = replace(stacked(plan), split_backward=any(splits_of(plan)))
    made = compose(alone, costs, hardware)
    devices, ends = plan.mesh.pipeline, ends_of(plan.pipeline)
    line = replace(plan.pipeline, costs=_seconds(made, devices), head=_head(made, devices, ends))
    coarse = coarse_of(replace(plan, pipeline=line))
    rows, room = _rows(alone, costs), plan.budget
    known = [
        replace(cost, static=cost.static - n, starting=first)
        for cost, n, first in zip(costs_of(made), rows, _starting(alone, costs), strict=True)
    ]
    if below:
        known, rows = [replace(cost, static=0) for cost in known], [0]
    if room is not None:
        room -= sum(rows) + (0 if ends is None else _logits(costs, ends))
    if coarse.paths:  # microbatches end anywhere, so that the head is no stage of its own
        known = [*known[:-2], _joined(known[-2], known[-1])]
    if least:
        cuts = tightest(known, coarse.placement, in_flight(coarse))
        return replace(plan, pipeline=replace(line, cuts=cuts))
    try:
        cuts = partition(known, coarse.placement, room, in_flight(coarse))
    except OutsizeError:
        cuts = partition(known, coarse.placement)
    return replace(plan, pipeline=replace(line, cuts=cuts))


def costs_of(made: Forecast) -> list[Cost]:
    """By fine stage of the forecast's plan. Of the seconds of an action the least in its trace,
    where that has several steps: what disturbs it only adds."""
    plan, shortest = made.plan, dict[tuple[int, int, str], float]()
    for event in made.trace.events:
        if event.kind in PASSES:
            key, took = (event.stage, event.microbatch, event.kind), event.end - event.start
            shortest[key] = min(took, shortest.get(key, took))
    seconds, microbatches = [0.0] * len(plan.stages), len({m for _, m, _ in shortest})
    for (number, _, _), took in shortest.items():
        seconds[number] += took
    found = []
    for stage, time in zip(plan.stages, seconds, strict=True):
        kinds = [kinds for _, kinds in made.segments[stage.first : stage.last]]
        static = sum(n for k in kinds for name, n in k.items() if name not in (_KEPT, _PASSING))
        kept = sum(k.get(_KEPT, 0) for k in kinds)  # negative where it frees more of its input
        found.append(Cost(time / microbatches, static, max(0, kept)))
    return found


def _rows(plan: Plan, costs: Costs) -> list[int]:
    """By stage, bytes of the states that the pipeline axis cuts: every worker has some of them."""
    placement, found = costs.facts.placement(plan), [0] * len(plan.stages)
    for index, table in enumerate(placement.chunks.tables):
        for what, _ in placement.chunks.held(index) if table.on(LINE) else ():
            found[placement.chunks.stage_of[table.segment]] += placement.chunks.nbytes(index, what)
    return found


def _starting(plan: Plan, costs: Costs) -> list[int]:
    """By stage, the most bytes beside all states while its first values are written."""
    placement, found = costs.facts.placement(plan), [0] * len(plan.stages)
    for index, table in enumerate(placement.chunks.tables):
        stage = placement.chunks.stage_of[table.segment]
        found[stage] = max(found[stage], of_chunk(placement, index, costs.facts.filling))
    return found


def _logits(costs: Costs, ends: Ends) -> int:
    """Bytes that every worker keeps of a microbatch's last layer."""
    made = (cost for (kind, _, _), cost in costs.actions.items() if kind is ends.holds[0])
    return sum(sum(cost.allocates.values()) for cost in made)


def _joined(one: Cost, other: Cost) -> Cost:
    return Cost(
        one.seconds + other.seconds,
        one.static + other.static,
        one.activations + other.activations,
        max(one.starting, other.starting),
    )


def _seconds(made: Forecast, workers: int) -> tuple[float, float, float]:
    """Of a microbatch through one worker's part: forward, input gradient, weight gradient. Where
    the two gradients are not apart, half of their time each."""
    total = _total(made, PASSES)
    both = total[Kind.BACKWARD] / 2
    of_input = total[Kind.RECOMPUTE] + total[Kind.BACKWARD_INPUT] + both
    forward = total[Kind.FORWARD] + total[Kind.LOSS]
    each = (forward, of_input, total[Kind.BACKWARD_WEIGHT] + both)
    return _rounded([max(seconds, 1e-9) / workers for seconds in each])


def _head(made: Forecast, workers: int, ends: Ends | None) -> tuple[float, float, float]:
    """The same of the whole head, of which a worker has its part; (1, 1, 1) where it is not cut. A
    pass takes as long for each of the seconds that it stands for."""
    if ends is None:
        return (1.0, 1.0, 1.0)
    found = dict[str, float]()
    for kind, seconds in _total(made, ends.at("last")).items():
        names = ends.priced[kind]
        found |= dict.fromkeys(names, max(seconds, 1e-9) * workers / len(names))
    return _rounded([found[name] for name in ("forward", "of_input", "of_weight")])


def _total(made: Forecast, kinds: Sequence[Kind]) -> dict[Kind, float]:
    """Seconds of a microbatch's actions, by kind."""
    total = dict.fromkeys(kinds, 0.0)
    for event in made.trace.events:
        if event.microbatch == 0 and event.kind in total:
            total[Kind(event.kind)] += event.end - event.start
    return total


def _rounded(values: Sequence[float]) -> tuple[float, float, float]:
    """To few digits: what a schedule is made for should not tell one rounding from another."""
    a, b, c = (round(v, _DIGITS - 1 - floor(log10(v))) for v in values)
    return a, b, c
