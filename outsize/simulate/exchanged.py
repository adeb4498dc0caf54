"""Bytes of the ends that all workers share on one worker of a pipeline, where they are not what a
rehearsal has counted, whose worker has every stage.

What all workers have summed is used by one of them: the others let it go when they come to use a
later exchange (`Rows` of outsize/runtime/rows.py). What is sent to all others stays until the last
of them has it and it is no longer needed here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from outsize.schedule import Action, Kind, Schedule, State
from outsize.schedule.action import WHOLE
from outsize.simulate.costs import Costs

Name = tuple[State, int]  # what is exchanged or given, and its microbatch


@dataclass
class Exchanged:
    """Of one worker's list. more: by place of an action and microbatch, the bytes of the microbatch
    that come (negative: go) with the action beside its own. before: by place, of those that go the
    ones that have gone when it begins."""

    more: Counter[tuple[int, int]] = field(default_factory=Counter)
    before: Counter[int] = field(default_factory=Counter)


def parted(action: Action) -> bool:
    """Whether it sends an end of a microbatch's path to a worker with other rows."""
    return action.kind is Kind.SEND and action.part != WHOLE


def exchanged(schedule: Schedule, costs: Costs) -> Exchanged:
    """What a worker's list holds of sums that another uses."""
    plays = frozenset() if schedule.role is None else schedule.role.plays
    actions, found, ends = schedule.workers[0], Exchanged(), schedule.ends
    if ends is None:
        return found
    kept = ends.needs.get(ends.holds[1])  # what the first of `holds` has made a part of
    settles = {a.microbatch: i for i, a in enumerate(actions) if a.kind is ends.holds[1]}
    waiting: deque[Name] = deque()
    sizes: dict[Name, int] = {}
    for index, action in enumerate(actions):
        m = action.microbatch
        if action.kind is Kind.EXCHANGE:
            cost = costs.of(action)
            waiting.append((action.state, m))
            sizes[action.state, m] = 0 if cost is None else cost.moves
        state = schedule.exchanged(action)
        if state is not None and state is kept and action.kind.way == "back" and settles[m] > index:
            found.more[index, m] += sizes[state, m]  # taken here, and needed still
            found.more[settles[m], m] -= sizes[state, m]
        while state is not None and (state, m) in waiting:
            what, of = waiting.popleft()
            end = schedule.begin(of) if what is State.ACTIVATIONS else schedule.end(of)
            if (end, of) in plays:
                continue
            late = what is kept
            found.more[max(index, settles[of]) if late else index, of] -= sizes[what, of]
            found.before[index] += 0 if late else sizes[what, of]
    return found


def held_longer(schedule: Schedule, costs: Costs, gone: Mapping[int, int]) -> Counter[int]:
    """Bytes by place of what is sent to all others and goes later than with this worker's passes.
    gone: by place of a SEND, where it certainly has gone."""
    actions, found, ends = schedule.workers[0], Counter[int](), schedule.ends
    if ends is None:
        return found
    needed = {(a.kind, a.microbatch): i for i, a in enumerate(actions)}
    last: dict[tuple[int, int], int] = {}  # by where it is needed last, and its size
    for index, action in enumerate(actions):
        cost = costs.of(action)
        if parted(action) and cost is not None:
            name = (needed[ends.user(action.state), action.microbatch], cost.moves)
            last[name] = max(gone[index], last.get(name, 0))
    for (here, size), place in last.items():
        if place > here:
            found[here] += size
            found[place] -= size
    return found
