"""The pass that lets activations leave behind their FORWARD and come back in time: EVICT, FETCH."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.schedule import Schedule

SPILL_AHEAD = 2  # compute actions before the one that reads activations: when they are asked for
SPILL_GONE = 3  # compute actions after which they can have gone: one writes, at the next they go


def spill(
    schedule: Schedule,
    stages: frozenset[int],
    before: defaultdict[int, list[Action]],
    after: defaultdict[int, list[Action]],
) -> None:
    """Activations leave behind FORWARD and come back in time for what reads them first."""
    actions = schedule.workers[0]
    made: dict[tuple[int, int], int] = {}
    for index, action in enumerate(actions):
        here = (action.stage, action.microbatch)
        if action.stage not in stages or action.microbatch == WHOLE:
            continue
        if action.stage < schedule.first:  # frozen: nothing is kept
            continue
        if action.kind.way == "forward":
            made[here] = index
        elif here in made:
            left = made.pop(here)
            if index - left <= SPILL_GONE:  # it is read before it could be gone
                continue
            move = Action(Kind.EVICT, *here, Lane.EVICT, state=State.ACTIVATIONS)
            after[left].append(move)
            back = replace(move, kind=Kind.FETCH, lane=Lane.FETCH)
            before[max(left + SPILL_GONE, index - SPILL_AHEAD)].append(back)
