"""Replay: a schedule with its actions' costs, played by the clock and the byte count alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from outsize.schedule import Action, Kind, Lane, Schedule, State
from outsize.schedule.waits import settled, waits
from outsize.simulate.rehearse import ActionCost, Costs, moved
from outsize.trace.trace import Event, Trace

_NOTHING = ActionCost({}, 0, None)  # type: ignore[arg-type]


def annotate(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with every action's bytes filled in."""
    return replace(
        schedule,
        workers=tuple(tuple(_filled(a, costs) for a in actions) for actions in schedule.workers),
    )


def _filled(action: Action, costs: Costs) -> Action:
    cost = costs.actions.get(moved(action), _NOTHING)
    allocates = tuple((f"device/{kind}", count) for kind, count in cost.allocates.items())
    return replace(action, allocates=allocates, workspace=cost.workspace)


def play(
    schedule: Schedule, static: Mapping[str, int], seconds: Callable[[Action], float]
) -> Trace:
    """The foretold trace of an annotated schedule of one worker.

    Lanes run beside each other as the runtime's do (outsize/runtime/lanes.py): each in the order of
    the list, waiting for what it needs; bytes come and go where the computing thread says.
    """
    actions = schedule.workers[0]
    waiting, due = waits(schedule), settled(schedule)
    live = {f"device/{kind}": count for kind, count in static.items()}
    free: dict[Lane, float] = {}
    ends: list[float] = []
    events = []
    for index, action in enumerate(actions):
        gone = due.get(index, ())
        for place in gone:
            _apply(live, actions[place])
        before = sum(live.values())
        if not _leaves(action):
            _apply(live, action)
        needed = (ends[place] for place in (*waiting[index], *gone))
        start = max(free.get(action.lane, 0.0), *needed, 0.0)
        end = start + seconds(action)
        free[action.lane] = end
        ends.append(end)
        computes = action.lane is Lane.COMPUTE
        peak = max(before + action.workspace, sum(live.values())) if computes else 0
        events.append(
            Event(
                0, action.lane.value, action.label, action.stage, action.microbatch, start, end,
                dict(live) if computes else {}, peak, action.part,
            )
        )  # fmt: skip
    return Trace("foretold", tuple(sorted(events, key=lambda event: event.start)))


def _leaves(action: Action) -> bool:
    """Bytes of activations that leave go later, where the runtime lets go of them."""
    return action.kind is Kind.EVICT and action.state is State.ACTIVATIONS


def _apply(live: dict[str, int], action: Action) -> None:
    for where, count in action.allocates:
        live[where] = live.get(where, 0) + count


def kinds_at_peak(trace: Trace, static: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind at the highest moment; what the action itself needed is workspace.

    static: bytes by kind that are there before the first action.
    """
    computing = [event for event in trace.events if event.lane == Lane.COMPUTE]
    top = max(computing, key=lambda event: event.peak)
    index = computing.index(top)
    start = {f"device/{kind}": count for kind, count in static.items()}
    before = computing[index - 1].live if index else start
    kinds = {where.partition("/")[2]: count for where, count in before.items() if count}
    kinds["workspace"] = kinds.get("workspace", 0) + top.peak - sum(before.values())
    return kinds
