"""Microbatches forward on one worker of a pipeline: an evaluation, or tokens of requests."""

from __future__ import annotations

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.compile.forward import forward
from outsize.schedule.ends import Ends
from outsize.schedule.passes.pipeline import exchange_at
from outsize.schedule.pipelined import Pipelining, Placed
from outsize.schedule.role import Role
from outsize.schedule.schedule import Schedule

_AHEAD = 2  # turns before its first stage's at which a microbatch's embedding is made
_ENTER, _LEAVE, _DRAW = -2, -1, -3  # the ends of a path at which a turn of an evaluation is
_Turn = tuple[list[Action], list[Action], list[Action]]  # moves before, actions, moves behind


def forwards(
    line: Pipelining,
    worker: int,
    microbatches: int,
    kind: Kind = Kind.FORWARD,
    groups: int = 0,
) -> tuple[Schedule, list[Placed]]:
    """So many microbatches forward, one behind the other through the stages, and what is sent and
    received behind how many actions.

    Every worker's list is a part of one order of everything, in which each tensor is received right
    behind its sending: so it can run, however few may be under way. Of ends that are cut, the first
    layer is made ahead, and the last a turn behind the last stage. groups: so many microbatches
    have all rows, and each that follows goes on from what SAMPLE draws at the end of the one so
    many before it; 0: nothing is drawn.
    """
    route, turns = line.coarse.placement.routes[0], list[tuple[int, int, int, int]]()
    ends = line.coarse.schedule.ends
    for m in range(microbatches):
        start = m // groups * max(groups, len(route)) + m % groups if groups else m
        turns += ((start + p, -p, m, p) for p in range(len(route)))
        if groups:
            turns.append((start + len(route) - 1, 1, m, _DRAW))
        if ends is not None:
            turns += [(m - _AHEAD, 0, m, _ENTER), (m + len(route), 1, m, _LEAVE)]
    actions, moves = list[Action](), list[Placed]()
    for _, _, m, part in sorted(turns):
        if part >= 0:
            before, more, behind = _stage(line, worker, m, part, kind)
        elif part == _DRAW:
            before, more, behind = [], [Action(Kind.SAMPLE, microbatch=m)], []
        elif ends is not None:
            before, more, behind = _passes(line, ends, worker, m, part)
        moves += ((len(actions), move) for move in before)
        actions += more
        moves += ((len(actions), move) for move in behind)
    plays = frozenset((a.stage, a.microbatch) for a in actions if a.kind.way)
    role = Role(plays, line.role(worker).holds, (), line.others(worker))
    stages = len(line.uses)
    made = Schedule(
        stages, microbatches, (tuple(actions),), first=stages, ends=ends, role=role,
        again=groups if groups < microbatches else 0,
    )  # fmt: skip
    return made, moves


def _stage(line: Pipelining, worker: int, m: int, part: int, kind: Kind) -> _Turn:
    """A stage of the pipeline forward."""
    route, run = line.coarse.placement.routes[0], line.run(part)
    if route[part] == worker:
        return (
            [],
            [forward(s, m, line.loses, kind) for s in run],
            edges(line, worker, run[-1], m)[1],
        )
    comes = part + 1 < len(route) and route[part + 1] == worker
    return [], [], edges(line, worker, run[-1] + 1, m)[0] if comes else []


def edges(line: Pipelining, worker: int, stage: int, m: int) -> tuple[list[Action], list[Action]]:
    """What a worker receives before a microbatch goes forward through a stage of the plan, and
    sends behind that, where others have the stages around it."""
    route, part = line.coarse.placement.routes[0], line.part(stage)
    before, after = list[Action](), list[Action]()
    if stage == line.bounds[part] and part and route[part - 1] != worker:
        before.append(_move(Kind.RECV, stage - 1, m))
    if stage == line.run(part)[-1] and part + 1 < len(route) and route[part + 1] != worker:
        after.append(_move(Kind.SEND, stage, m))
    return before, after


def _passes(line: Pipelining, ends: Ends, worker: int, m: int, part: int) -> _Turn:
    """A worker's part of the first layer, or of the losses."""
    kind = ends.ahead[part == _LEAVE]
    action, behind = Action(kind, line.edge(kind), m), exchange_at(line, ends.makes[kind], m)
    if part == _ENTER:
        return [], [action], [behind]
    last, root = len(line.uses) - 1, line.coarse.placement.routes[0][-1]
    moves = [_move(Kind.RECV, last, m, worker)]
    if root == worker:
        moves = [_move(Kind.SEND, last, m, other) for other in line.others(worker)]
    return moves, [action], [behind]


def _move(kind: Kind, stage: int, microbatch: int, part: int = WHOLE) -> Action:
    lane = Lane.SEND if kind is Kind.SEND else Lane.RECEIVE
    return Action(kind, stage, microbatch, lane, state=State.ACTIVATIONS, part=part)
