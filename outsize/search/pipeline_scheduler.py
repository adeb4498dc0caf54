"""The automatic pipeline scheduler: the shortest step for given times under a cap of memory.

It starts from every published schedule that fits and from heuristics made for the cap, splits the
gradients, lets weight gradients fill waits, and then improves the orders step by step: an action
goes to another place in its worker's order where that shortens the step. What it gives is never
longer than the best published one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from outsize.errors import OutsizeError
from outsize.plan.spread import AUTO
from outsize.schedule.action import Action, Kind
from outsize.schedule.ends import Ends
from outsize.schedule.pipelines import NAMES, Pipeline, Shape, make, pipeline, zero_bubble
from outsize.schedule.pipelines.costs import Costs
from outsize.schedule.pipelines.greedy import greedy, makespan
from outsize.schedule.pipelines.pipeline import with_ends
from outsize.schedule.place import Placement, looped, one_way, waved
from outsize.search.reorder import filled, improved, split
from outsize.simulate.coarse import Played, Times, play

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_SLACK = 1e-9


@dataclass(frozen=True)
class Ranked:
    """One schedule of a comparison. Seconds, and microbatches of a worker's layers.

    played: None where the schedule cannot be had, and why says so.
    """

    name: str
    makespan: float = float("inf")
    peak: float = float("inf")
    played: Played | None = None
    why: str = ""


def units(place: Placement) -> float:
    """How many of a placement's units are the layers of one worker."""
    return place.share * place.stages / place.workers


def compare(
    shape: Shape, times: Times, cap: float | None = None, ends: Ends | None = None
) -> list[Ranked]:
    """Every schedule and the automatic one, the shortest step first, those that do not fit last.

    times: of a worker's layers. cap: microbatches of a worker's layers that it may hold.
    ends: how all have their first and last layer cut over the workers, if they have.
    """
    named = [ranked(name, shape, times, cap, ends) for name in NAMES]
    found = [one for one in named if one.played is not None]
    if ends is not None:
        every = [*named, _automatic_cut(shape, times, cap, ends, found)]
    else:
        every = [*named, _automatic(shape, times, cap, found)]
    return sorted(every, key=lambda one: (one.played is None, one.makespan, one.peak))


def automatic(shape: Shape, times: Times, cap: float | None = None) -> Played:
    """The shortest step found. Raises OutsizeError where not even one microbatch fits."""
    named = (ranked(name, shape, times, cap) for name in NAMES)
    best = _automatic(shape, times, cap, [one for one in named if one.played is not None])
    assert best.played is not None
    return best.played


def _automatic_cut(
    shape: Shape, times: Times, cap: float | None, ends: Ends, named: Sequence[Ranked]
) -> Ranked:
    """The best of the named ones and of the automatic one's orders with their ends cut."""
    found, room = list(named), None if cap is None else cap - ends.barriers
    if room is None or room >= 1:
        plain = automatic(shape, replace(times, ends=None), room).pipeline
        found.append(_measured(AUTO, plain, times, cap, ends))
    best = min(found, key=lambda one: one.makespan, default=Ranked(AUTO, why="none fits the cap"))
    return replace(best, name=AUTO)


def ranked(
    name: str, shape: Shape, times: Times, cap: float | None, ends: Ends | None = None
) -> Ranked:
    """A named schedule at the size of its microbatches' layers on a worker."""
    bare = replace(shape, chunks=None, waves=None, skip=None)
    try:
        made = make(name, bare)
    except OutsizeError as error:
        return Ranked(name, why=str(error))
    if made.approximate:
        return Ranked(name, why=f"approximate: {made.approximate}")
    return _measured(name, made, times, cap, ends)


def _measured(
    name: str, made: Pipeline, times: Times, cap: float | None, ends: Ends | None
) -> Ranked:
    per = units(made.placement)
    unit = _scaled(times, 1 / per)
    if ends is not None and unit.ends is not None:
        costs = Costs(unit.forward, unit.of_input, unit.of_weight, unit.transfer)
        made = with_ends(made, ends, costs, unit.ends)
    played = play(made, unit)
    peak = max(played.run.peaks) / per
    if cap is not None and peak > cap + _SLACK:
        return Ranked(name, why=f"holds {peak:g} microbatches, above the cap of {cap:g}")
    return Ranked(name, played.run.makespan, peak, played)


def _scaled(times: Times, by: float) -> Times:
    both = None if times.both is None else times.both * by
    return replace(
        times,
        forward=times.forward * by,
        of_input=times.of_input * by,
        of_weight=times.of_weight * by,
        both=both,
    )


def _automatic(shape: Shape, times: Times, cap: float | None, named: Sequence[Ranked]) -> Ranked:
    held = float(shape.microbatches) if cap is None else cap
    if held < 1:
        raise OutsizeError(
            f"memory cap: {held:g} microbatches; expected at least 1, which is the nearest"
        )
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer).whole()
    tries = [
        (best_orders(place, costs, held, starts), place)
        for place, starts in _placements(shape, costs, held, named)
    ]
    orders, place = min(tries, key=lambda t: makespan(t[1], t[0], costs))
    played = play(pipeline(AUTO, place, orders), times)
    best = min(named, key=lambda one: one.makespan, default=None)
    if best is not None and best.played and best.makespan <= played.run.makespan:
        kept = replace(best.played, pipeline=replace(best.played.pipeline, name=AUTO))
        return Ranked(AUTO, best.makespan, best.peak, kept)
    return Ranked(AUTO, played.run.makespan, max(played.run.peaks), played)


def found_orders(
    shape: Shape, times: Times, held: float, named: Sequence[Ranked]
) -> Iterator[Pipeline]:
    """The shortest orders with one stage a worker, and with two in a V, with at most `held`
    microbatches of its layers on a worker, before they are improved. named: what is begun with."""
    costs = Costs(times.forward, times.of_input, times.of_weight, times.transfer).whole()
    for place, starts in _placements(shape, costs, held, named):
        yield pipeline(AUTO, place, _begun(place, costs, held, starts)[0])


_Orders = list[list[Action]]


def _placements(
    shape: Shape, costs: Costs, held: float, named: Sequence[Ranked]
) -> Iterator[tuple[Placement, list[_Orders]]]:
    """One stage a worker, and a V of two, each with the orders that are known for it."""
    for chunks in (1, 2):
        route = waved(shape.devices, chunks) if chunks > 1 else looped(shape.devices, 1)
        place = one_way(shape.devices, route, shape.microbatches)
        starts = [
            computed(one.played.pipeline)
            for one in named
            if one.played is not None and one.played.pipeline.placement == place
        ]
        if chunks == 1:
            made = zero_bubble("ZB", shape.devices, shape.microbatches, costs, int(held + _SLACK))
            starts.append(computed(made))
        yield place, starts


def computed(made: Pipeline) -> _Orders:
    """What each worker computes, in order."""
    return [[a for a in actions if a.kind in _COMPUTE] for actions in made.schedule.workers]


def best_orders(
    place: Placement, costs: Costs, held: float, starts: Iterable[_Orders] = ()
) -> _Orders:
    """The shortest orders found on a placement with at most `held` units on a worker.

    costs: of one unit. starts: orders to improve beside those that the greedy rule gives.
    """
    best = _begun(place, costs, held, starts)[:_KEPT]
    return min(
        (improved(place, orders, costs, held) for orders in best),
        key=lambda orders: makespan(place, orders, costs),
    )


def _begun(place: Placement, costs: Costs, held: float, starts: Iterable[_Orders]) -> list[_Orders]:
    """Orders with their gradients split and weight gradients in waits, the shortest first."""
    whole = int(held + _SLACK)
    ruled = (greedy(place, costs, whole, under_way) for under_way in range(1, whole + 1))
    begun = [split(orders) for orders in (*starts, *(o for o in ruled if o is not None))]
    tried = [
        orders
        for begin in begun
        for orders in (begin, *(filled(place, begin, costs, held, early) for early in (0, 1, 2)))
    ]
    return sorted(tried, key=lambda orders: makespan(place, orders, costs))


_KEPT = 4  # starts that are improved
