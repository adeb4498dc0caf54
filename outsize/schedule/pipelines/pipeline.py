"""Pipeline: a placement and compute orders, made into a Schedule with its sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outsize.registry import Registry
from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.ends import Barrier, Ends
from outsize.schedule.pipelines.costs import Costs, EndCosts
from outsize.schedule.pipelines.weave import Key, Move, woven
from outsize.schedule.place import Placement
from outsize.schedule.role import neighbours
from outsize.schedule.schedule import Schedule

Order = Sequence[Action]  # what one worker computes, in order
Pair = tuple[int, int]  # the stage and the microbatch of a FORWARD
Paths = tuple[tuple[int, ...], ...]  # the stages that each microbatch visits


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
    ends: Ends | None = None,
) -> Pipeline:
    """Join compute orders by sends and receives, and end every worker with NORM and UPDATE.

    ends: where orders have passes of all workers at the ends of paths.
    """
    around = paths or plain_paths(placement)
    moves = _moves(orders, around)
    if ends is not None:
        moves += _parts(placement, around, ends)

    def before(action: Action) -> Barrier | None:
        return None if ends is None else ends.before(action, around[action.microbatch])

    joined = woven(orders, moves, together, before)
    workers = []
    for worker, actions in enumerate(joined):
        held = [s for s in range(placement.stages) if worker in placement.holders(s)]
        actions = [*actions, Action(Kind.NORM)]
        actions += [Action(Kind.UPDATE, s) for s in held]
        workers.append((*actions, *([Action(Kind.UPDATE)] if ends else ())))
    schedule = Schedule(placement.stages, placement.microbatches, tuple(workers), ends=ends)
    return Pipeline(name, placement, schedule, together, paths, approximate)


# By name of Ends, what puts their passes into a schedule. Costs: of one unit, and of the ends.
Placing = Callable[[Pipeline, Ends, Costs, EndCosts], Pipeline]
PLACINGS: Registry[Placing] = Registry("placing of the passes of all workers")


def with_ends(made: Pipeline, ends: Ends, costs: Costs, priced: EndCosts) -> Pipeline:
    """A schedule whose ends are cut over all workers."""
    return PLACINGS.get(ends.name)(made, ends, costs, priced)


def plain_paths(place: Placement) -> Paths:
    """Every microbatch through every stage."""
    return (tuple(range(place.stages)),) * place.microbatches


def _moves(orders: Sequence[Order], paths: Paths) -> list[Move]:
    """Every tensor that changes its worker between stages."""
    around = [neighbours(path) for path in paths]
    where = {
        (action.kind.way == "back", action.stage, action.microbatch): worker
        for worker, order in enumerate(orders)
        for action in order
        if action.kind.way
    }
    moves = []
    for (back, stage, microbatch), sender in where.items():
        to = around[microbatch][not back].get(stage)
        receiver = None if to is None else where.get((back, to, microbatch))
        if to is not None and receiver is not None and receiver != sender:
            state = State.GRADIENTS if back else State.ACTIVATIONS
            named = to if back else stage  # a gradient bears the name of the output it belongs to
            tensor = (state, named, microbatch)
            made, used = (_layer(back, s, microbatch) for s in (stage, to))
            moves.append(Move(tensor, sender, receiver, made, used))
    return moves


def _layer(back: bool, stage: int, microbatch: int) -> Key:
    return (Kind.BACKWARD if back else Kind.FORWARD, stage, microbatch, WHOLE)


def _parts(placement: Placement, paths: Paths, ends: Ends) -> list[Move]:
    """The last stage's outputs and the gradients of the first one's inputs, to all workers."""
    moves = []
    for m, path in enumerate(paths):
        for use, state in ends.given.items():
            stage = path[-1 if use.end == "last" else 0]
            sender = placement.worker(stage, m)
            made = _layer(state is State.GRADIENTS, stage, m)
            moves += [
                Move((state, stage, m), sender, w, made, (use, stage, m, w), w)
                for w in range(placement.workers)
                if w != sender
            ]
    return moves
