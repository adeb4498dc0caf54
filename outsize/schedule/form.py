"""What an action and a path must be by themselves, before they are played."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import OutsizeError
from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.away import MOVED
from outsize.schedule.schedule import Schedule
from outsize.schedule.vocabulary import misfit

MOVES = (Kind.SEND, Kind.RECV)
_TRAINED = (
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.RECOMPUTE,
    Kind.UPDATE,
)


def paths_of(schedule: Schedule, paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Each microbatch's stages, the plain way where nothing else is said."""
    if not paths:
        return [tuple(range(schedule.stages))] * schedule.microbatches
    if len(paths) != schedule.microbatches:
        raise OutsizeError(
            f"schedule: {len(paths)} paths for {schedule.microbatches} microbatches;"
            " expected one each"
        )
    for microbatch, path in enumerate(paths):
        inside = all(0 <= stage < schedule.stages for stage in path)
        if not path or not inside or len(set(path)) < len(path):
            raise OutsizeError(
                f"schedule: the path of microbatch {microbatch} is {tuple(path)}; expected"
                f" stages from 0 to {schedule.stages - 1}, each once"
            )
    return [tuple(path) for path in paths]


def malformed(schedule: Schedule, action: Action) -> str:
    """What is wrong with an action by itself."""
    kind = action.kind
    if kind in MOVED and action.state is not State.ACTIVATIONS:
        return "is not of a pipeline; prove the schedule before the pass that adds it"
    tables = kind is Kind.UPDATE and schedule.vocabulary and action.stage == WHOLE
    for name, value, limit, wanted in (
        ("stage", action.stage, schedule.stages, kind is not Kind.NORM and not tables),
        ("microbatch", action.microbatch, schedule.microbatches,
         kind not in (Kind.NORM, Kind.UPDATE)),
    ):  # fmt: skip
        if wanted and not 0 <= value < limit:
            return f"{name} is {value}; expected 0 to {limit - 1}"
        if not wanted and value != WHOLE:
            return f"is of the whole step; expected no {name}"
    moved = action.state in (State.ACTIVATIONS, State.GRADIENTS)
    moves = kind in (*MOVES, *MOVED)
    if kind is not Kind.EXCHANGE and (moved != moves or (not moved and action.state)):
        return f"moves {action.state.value or 'nothing'}; expected activations or gradients"
    if kind in _TRAINED and not tables and action.stage < schedule.first:
        return f"stage {action.stage} is frozen; the first that is trained is {schedule.first}"
    return misfit(schedule, action)
