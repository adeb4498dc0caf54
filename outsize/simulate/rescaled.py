"""A forecast as runs before it let expect: its step, or each of its lanes, so much longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from outsize.schedule import Action
from outsize.simulate.forecast import Forecast
from outsize.simulate.replay import play
from outsize.trace.trace import Trace


def lanes(trace: Trace) -> dict[str, float]:
    """Seconds in which each lane of the first worker is at work."""
    found: dict[str, float] = defaultdict(float)
    for event in trace.events:
        if event.worker == trace.events[0].worker and event.end > event.start:
            found[event.lane] += event.end - event.start
    return dict(found)


def by_step(made: Forecast, factor: float) -> Forecast:
    """Everything so many times as long."""
    events = tuple(
        replace(event, start=event.start * factor, end=event.end * factor)
        for event in made.trace.events
    )
    return replace(made, trace=replace(made.trace, events=events), seconds=made.seconds * factor)


def by_lane(made: Forecast, factors: Mapping[str, float]) -> Forecast:
    """The actions of a lane so many times as long, played again; of one list, not a pipeline's."""
    known = {
        (e.lane, e.kind, e.stage, e.microbatch, e.part): e.end - e.start for e in made.trace.events
    }

    def seconds(_: int, action: Action) -> float:
        lane = action.lane.value
        spent = known[lane, action.label, action.stage, action.microbatch, action.part]
        return spent * factors.get(lane, 1.0)

    trace = play(made.schedule, made.static, seconds)
    return replace(made, trace=trace, seconds=trace.span())
