"""Replay: a schedule with its actions' costs, played by the clock and the byte count alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from outsize.schedule import Action, Schedule
from outsize.simulate.rehearse import ActionCost, Costs
from outsize.trace.trace import Event, Trace

_NOTHING = ActionCost({}, 0, None)  # type: ignore[arg-type]


def annotate(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with every action's bytes filled in."""
    return replace(
        schedule,
        workers=tuple(tuple(_filled(a, costs) for a in actions) for actions in schedule.workers),
    )


def _filled(action: Action, costs: Costs) -> Action:
    cost = costs.actions.get((action.kind, action.stage), _NOTHING)
    allocates = tuple((f"device/{kind}", count) for kind, count in cost.allocates.items())
    return replace(action, allocates=allocates, workspace=cost.workspace)


def play(
    schedule: Schedule, static: Mapping[str, int], seconds: Callable[[Action], float]
) -> Trace:
    """The foretold trace of an annotated schedule: one worker, one lane, one after another."""
    live = {f"device/{kind}": count for kind, count in static.items()}
    clock, events = 0.0, []
    for action in schedule.workers[0]:
        before = sum(live.values())
        for where, count in action.allocates:
            live[where] = live.get(where, 0) + count
        end = clock + seconds(action)
        peak = max(before + action.workspace, sum(live.values()))
        events.append(
            Event(
                0,
                action.lane.value,
                action.kind.value,
                action.stage,
                action.microbatch,
                clock,
                end,
                dict(live),
                peak,
            )
        )
        clock = end
    return Trace("foretold", tuple(events))


def kinds_at_peak(trace: Trace, static: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind at the highest moment; what the action itself needed is workspace.

    static: bytes by kind that are there before the first action.
    """
    top = max(trace.events, key=lambda event: event.peak)
    index = trace.events.index(top)
    start = {f"device/{kind}": count for kind, count in static.items()}
    before = trace.events[index - 1].live if index else start
    kinds = {where.partition("/")[2]: count for where, count in before.items() if count}
    kinds["workspace"] = kinds.get("workspace", 0) + top.peak - sum(before.values())
    return kinds
