"""The pass that joins a worker's list of a pipeline to the others': SEND, RECV, EXCHANGE, MERGE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outsize.plan import Plan
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.compile.train import fine_of
from outsize.schedule.ends import exchange
from outsize.schedule.passes.shard import adds
from outsize.schedule.pipelined import Pipelining, Placed
from outsize.schedule.schedule import Schedule


def linked(schedule: Schedule, line: Pipelining, plan: Plan, worker: int) -> Schedule:
    """A worker's schedule with its sends, receives and sums of stages that others hold too.

    A tensor is received while the action before the one that uses it computes.
    """
    coarse, moves = line.order(worker)
    ends = [0]
    for action in coarse:
        ends.append(ends[-1] + sum(1 for _ in fine_of(line, plan, action)))
    named = ((ends[_turn(place, move)], _named(line, move)) for place, move in moves)
    wanted = [(place, move) for place, move in named if _wanted(line, move)]
    made = placed(schedule, wanted)
    return replace(made, workers=(tuple(_merging(made, line, worker)),))


def _turn(place: int, move: Action) -> int:
    return max(0, place - 1) if move.kind is Kind.RECV else place


def placed(schedule: Schedule, moves: Sequence[Placed]) -> Schedule:
    """A worker's schedule with sends and receives behind so many of its computing actions."""
    after: dict[int, list[Action]] = {}
    for place, move in moves:
        after.setdefault(place, []).append(move)
    actions, count = list(after.get(0, ())), 0
    for action in schedule.workers[0]:
        actions.append(action)
        if action.lane is Lane.COMPUTE:
            count += 1
            actions += after.get(count, ())
    return replace(schedule, workers=(tuple(actions),))


def _wanted(line: Pipelining, move: Action) -> bool:
    """Gradients of what is frozen go nowhere; those of a last stage's output are summed."""
    summed = move.kind is Kind.EXCHANGE
    return summed or move.state is not State.GRADIENTS or move.stage >= line.first


def _named(line: Pipelining, move: Action) -> Action:
    """A move by the plan's stage whose output it carries; a part of a gradient by the stage of
    whose input that is."""
    if move.kind is Kind.EXCHANGE:
        return exchange_at(line, move.state, move.microbatch)
    fine = line.fine(move.stage, move.microbatch)
    begins = move.part != WHOLE and move.state is State.GRADIENTS
    lane = Lane.SEND if move.kind is Kind.SEND else Lane.RECEIVE
    return replace(move, stage=fine[0 if begins else -1], lane=lane)


def _merging(schedule: Schedule, line: Pipelining, worker: int) -> Iterator[Action]:
    """The list with a MERGE behind the last part of each sum, in the order of all workers."""
    actions = schedule.workers[0]
    trained = frozenset[int]() if schedule.residency is None else schedule.residency.merged
    mine = [s for s in line.merged if worker in line.holders[s] and s in trained]
    last = dict.fromkeys(mine, -1)
    for index, action in enumerate(actions):
        if action.kind is Kind.REDUCE and action.stage in last:
            last[action.stage] = index
        elif adds(action, schedule.first):
            last |= {s: index for s in line.uses[action.stage] if s in last}
    at, after = -1, dict[int, list[Action]]()
    for stage in mine:
        at = max(at, last[stage])
        merge = Action(Kind.MERGE, stage, lane=Lane.MERGE, state=State.GRADIENTS)
        after.setdefault(at, []).append(merge)
    yield from after.get(-1, ())
    for index, action in enumerate(actions):
        yield action
        yield from after.get(index, ())


def exchange_at(line: Pipelining, state: State, microbatch: int) -> Action:
    return exchange(state, line.edge(Kind.EXCHANGE, state), microbatch)
