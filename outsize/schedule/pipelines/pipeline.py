"""Pipeline: a placement and compute orders, made into a Schedule with its sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.place import Placement
from outsize.schedule.schedule import Schedule

Order = Sequence[Action]  # what one worker computes, in order
Pair = tuple[int, int]  # the stage and the microbatch of a FORWARD
Paths = tuple[tuple[int, ...], ...]  # the stages that each microbatch visits
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class Pipeline:
    """A schedule, where its stages live, and what its actions alone do not say.

    together: the FORWARDs that run as one with the action behind them on their worker. paths: the
    stages of each microbatch where not all are visited in order. approximate: what changes in the
    maths, empty where nothing does.
    """

    name: str
    placement: Placement
    schedule: Schedule
    together: frozenset[Pair] = frozenset()
    paths: Paths = ()
    approximate: str = ""


def forward(stage: int, microbatch: int) -> Action:
    """The stage's outputs."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """Both gradients of the stage."""
    return Action(Kind.BACKWARD, stage, microbatch)


def of_input(stage: int, microbatch: int) -> Action:
    """The gradient of the stage's inputs alone."""
    return Action(Kind.BACKWARD_INPUT, stage, microbatch)


def of_weight(stage: int, microbatch: int) -> Action:
    """The gradient of the stage's weights, after that of its inputs."""
    return Action(Kind.BACKWARD_WEIGHT, stage, microbatch)


def pipeline(
    name: str,
    placement: Placement,
    orders: Sequence[Order],
    together: frozenset[Pair] = frozenset(),
    paths: Paths = (),
    approximate: str = "",
) -> Pipeline:
    """Join compute orders by sends and receives, and end every worker with NORM and UPDATE."""
    moves = _moves(placement, orders, together, paths)
    workers = []
    for worker, order in enumerate(orders):
        held = [s for s in range(placement.stages) if worker in placement.holders(s)]
        actions = [*_joined(worker, order, moves), Action(Kind.NORM)]
        workers.append((*actions, *(Action(Kind.UPDATE, s) for s in held)))
    schedule = Schedule(placement.stages, placement.microbatches, tuple(workers))
    return Pipeline(name, placement, schedule, together, paths, approximate)


def plain_paths(place: Placement) -> Paths:
    """Every microbatch through every stage."""
    return (tuple(range(place.stages)),) * place.microbatches


def neighbours(path: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """(the stage before, the stage after) of each stage of a path, where there is one."""
    return dict(zip(path[1:], path, strict=False)), dict(pairwise(path))


@dataclass(frozen=True)
class _Move:
    """A tensor from one worker's action to another's. Positions are in the two compute orders."""

    state: State
    stage: int
    microbatch: int
    sender: int
    made: int
    receiver: int
    used: int

    def action(self, kind: Kind) -> Action:
        """Either end of the move."""
        return Action(kind, self.stage, self.microbatch, Lane.NETWORK, state=self.state)


def _moves(
    placement: Placement,
    orders: Sequence[Order],
    together: frozenset[Pair],
    paths: Paths,
) -> list[_Move]:
    """Every tensor that changes its worker, by sender, in the order in which it is made."""
    where = {  # of each action: its worker and its slots, before and behind a pair that runs as one
        (a.kind in _BACK, a.stage, a.microbatch): (w, first, last)
        for w, order in enumerate(orders)
        for a, first, last in _slots(order, together)
        if a.kind in (Kind.FORWARD, *_BACK)
    }
    moves = []
    for (back, stage, microbatch), (sender, _, made) in where.items():
        path = paths[microbatch] if paths else range(placement.stages)
        before, after = neighbours(path)
        to = (before if back else after).get(stage)
        user = None if to is None else where.get((back, to, microbatch))
        if to is not None and user is not None and user[0] != sender:
            state = State.GRADIENTS if back else State.ACTIVATIONS
            named = to if back else stage  # a gradient bears the name of the output it belongs to
            moves.append(_Move(state, named, microbatch, sender, made, user[0], user[1]))
    return moves


def _slots(order: Order, together: frozenset[Pair]) -> Iterator[tuple[Action, int, int]]:
    """(action, the first and the last position of the step that it runs in)."""
    paired = False
    for i, action in enumerate(order):
        joins = action.kind is Kind.FORWARD and (action.stage, action.microbatch) in together
        yield action, i - paired, i + joins
        paired = joins


def _joined(worker: int, order: Order, moves: Iterable[_Move]) -> Iterator[Action]:
    """A worker's order with its receives before and its sends behind each action.

    Tensors from one worker to another are received in the order in which they are sent, so each
    is received no later than any that was sent after it is used.
    """
    arriving: dict[int, list[_Move]] = defaultdict(list)
    leaving: dict[int, list[_Move]] = defaultdict(list)
    channels: dict[int, list[_Move]] = defaultdict(list)
    for move in moves:
        if move.sender == worker:
            leaving[move.made].append(move)
        if move.receiver == worker:
            channels[move.sender].append(move)
    for channel in channels.values():
        latest = len(order)
        for move in reversed(channel):
            latest = min(latest, move.used)
            arriving[latest].insert(0, move)
    for i, action in enumerate(order):
        yield from (move.action(Kind.RECV) for move in arriving[i])
        yield action
        yield from (move.action(Kind.SEND) for move in leaving[i])
