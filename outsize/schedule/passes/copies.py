"""The pass that brings microbatches to a device whose memory is not the host's: COPY."""

from __future__ import annotations

from dataclasses import replace

from outsize.schedule.action import WHOLE, Action, Kind, Lane
from outsize.schedule.schedule import Schedule


def copied(schedule: Schedule) -> Schedule:
    """A worker's schedule in which every microbatch comes one ahead: before the first action of the
    one before it, and so while that computes."""
    actions, first = schedule.workers[0], dict[int, int]()
    for index, action in enumerate(actions):
        if action.microbatch != WHOLE:
            first.setdefault(action.microbatch, index)
    at, before = list(first.values()), dict[int, list[Action]]()
    for m, index in zip(first, [*at[:1], *at], strict=False):
        before.setdefault(index, []).append(Action(Kind.COPY, microbatch=m, lane=Lane.COPY))
    made = tuple(a for i, action in enumerate(actions) for a in (*before.get(i, ()), action))
    return replace(schedule, workers=(made,), copies=True)
