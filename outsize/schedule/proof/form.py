"""What an action must be by itself, before it is played: in the list that a worker runs (`misfit`)
and in a coarse list of a pipeline (`coarse_misfit`)."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import OutsizeError
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.residency import MOVES, SHARED
from outsize.schedule.schedule import Schedule

_LINKS = (Kind.SEND, Kind.RECV)
_PASSES = (*_LINKS, Kind.EXCHANGE)
_AWAY = (Kind.EVICT, Kind.FETCH)
_MOVED = (*_LINKS, *_AWAY)
_STEPS = (Kind.NORM, Kind.UPDATE)
_TRAINED = (
    Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE, Kind.UPDATE,
)  # fmt: skip


_UNKNOWN = "is of ends that are cut over all workers; the schedule has none"


def _of_ends(kind: Kind) -> bool:
    return bool(kind.end) or kind is Kind.EXCHANGE


def _known(schedule: Schedule, kind: Kind) -> bool:
    """Whether a schedule can have a kind: those of its own ends."""
    if schedule.ends is None:
        return not _of_ends(kind)
    return not kind.end or kind in schedule.ends.passes


def _misplaced(name: str, value: int, limit: int, wanted: bool) -> str:
    """What is wrong with a stage or a microbatch that an action has to have, or must not have."""
    if wanted:
        return "" if 0 <= value < limit else f"{name} is {value}; expected 0 to {limit - 1}"
    return "" if value == WHOLE else f"is of the whole step; expected no {name}"


def misfit(schedule: Schedule, action: Action) -> str:
    """What is wrong with an action of the list that one worker runs, by itself."""
    if not _known(schedule, action.kind):
        return _UNKNOWN
    loses = action.stage == schedule.loses or action.stage + 1 in schedule.cuts
    goes = Kind.LOSS if loses else Kind.FORWARD
    if action.kind in (Kind.FORWARD, Kind.LOSS) and action.kind is not goes:
        return f"is of stage {action.stage}; expected {goes} of it"
    passes = action.kind in _PASSES
    if action.kind in _LINKS and schedule.role is None:
        return "moves between workers; one worker plays this schedule"
    moves = passes or action.kind in MOVES
    if moves != bool(action.state):
        return f"{action.kind} moves {action.state.value or 'nothing'}; expected the other way"
    if action.kind in SHARED:
        state = State.GRADIENTS if action.kind is Kind.REDUCE else State.PARAMETERS
        if action.state is not state:
            return f"moves {action.state.value}; expected {state.value}"
    lane = action.kind.lane
    if action.lane is not lane and not (action.kind is Kind.UPDATE and action.lane is Lane.HOST):
        return f"is on the lane {action.lane}; expected {lane}"
    if action.kind is Kind.COPY and not schedule.copies:
        return "is for a device with memory of its own; the schedule is of one that has none"
    per_stage = action.kind not in (Kind.SAMPLE, Kind.COPY)
    if action.kind is Kind.NORM:
        per_stage = bool(schedule.cuts)
        if per_stage and action.stage != schedule.norm(action.stage):
            return "is of no group's first stage"
    whole = moves and not passes and action.state is not State.ACTIVATIONS
    per_microbatch = action.kind not in _STEPS and not whole
    reason = _misplaced("stage", action.stage, schedule.stages, per_stage)
    reason = reason or _misplaced(
        "microbatch", action.microbatch, schedule.microbatches, per_microbatch
    )
    if reason:
        return reason
    ahead = action.kind is Kind.UPDATE and action.stage in schedule.ahead
    if action.kind in _TRAINED and action.stage < schedule.first and not ahead:
        return f"stage {action.stage} is frozen; the first that is trained is {schedule.first}"
    return _foreign(schedule, action) or _part(schedule, action)


def _foreign(schedule: Schedule, action: Action) -> str:
    """Why an action is not of this worker, where it is one of many."""
    role, here = schedule.role, (action.stage, action.microbatch)
    anywhere = action.kind in (Kind.NORM, Kind.SAMPLE, Kind.COPY, *_LINKS)
    if role is None or anywhere or _of_ends(action.kind):
        return ""
    if action.microbatch != WHOLE:
        return "" if here in role.plays else "is another worker's"
    return "" if action.stage in role.holds else f"stage {action.stage} is on other workers"


def _part(schedule: Schedule, action: Action) -> str:
    parts = 0 if schedule.residency is None else schedule.residency.parts.get(action.stage, 0)
    in_part = action.kind is Kind.UPDATE or action.state is State.OPTIMIZER
    if action.part != WHOLE and schedule.ends and action.kind in _LINKS:
        return ""  # for another's part of an end: whose it is, EndsProof knows
    if not in_part or not parts:
        return "" if action.part == WHOLE else "is of a part; expected the whole stage"
    return "" if 0 <= action.part < parts else f"part is {action.part}; expected 0 to {parts - 1}"


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


def coarse_misfit(schedule: Schedule, action: Action, worker: int) -> str:
    """What is wrong with an action of a coarse list, by itself. schedule: of that worker."""
    kind = action.kind
    own = kind in _AWAY and action.state is State.ACTIVATIONS
    if kind is Kind.LOSS or (kind in MOVES and not own):
        return "is not of a pipeline; prove the schedule before the pass that adds it"
    ends = kind is Kind.UPDATE and schedule.ends and action.stage == WHOLE
    per_stage = kind is not Kind.NORM and not ends
    reason = _misplaced("stage", action.stage, schedule.stages, per_stage)
    reason = reason or _misplaced(
        "microbatch", action.microbatch, schedule.microbatches, kind not in _STEPS
    )
    if reason:
        return reason
    moved = action.state in (State.ACTIVATIONS, State.GRADIENTS)
    moves = kind in _MOVED
    if kind is not Kind.EXCHANGE and (moved != moves or (not moved and action.state)):
        return f"moves {action.state.value or 'nothing'}; expected activations or gradients"
    if kind in _TRAINED and not ends and action.stage < schedule.first:
        return f"stage {action.stage} is frozen; the first that is trained is {schedule.first}"
    return _coarse_ends(schedule, action, worker) or _off(schedule, action)


def _off(schedule: Schedule, action: Action) -> str:
    """Why an action is not where its microbatch goes, or where what it needs lies."""
    role, s, m = schedule.role, action.stage, action.microbatch
    assert role is not None
    if m == WHOLE:
        held = action.kind is Kind.NORM or s == WHOLE or s in role.holds
        return "" if held else f"stage {s} is on other workers"
    if role.paths and s not in role.paths[m]:
        return f"microbatch {m} does not visit stage {s}"
    if action.kind in _LINKS or _of_ends(action.kind) or (s, m) in role.plays:
        return ""
    return "is another worker's, or comes before its FORWARD: that is not on this worker"


def _coarse_ends(schedule: Schedule, action: Action, worker: int) -> str:
    """The same where that has to do with ends that all workers share."""
    kind, ends, m = action.kind, schedule.ends, action.microbatch
    if action.part != WHOLE:
        if not (ends and kind in _LINKS):
            return "has a part; expected one in sends and receives of ends that are cut alone"
        if kind is Kind.RECV and action.part != worker:
            return f"is of worker {action.part}'s part; expected it to be received there"
    if not _of_ends(kind):
        return ""
    if ends is None or not _known(schedule, kind):
        return _UNKNOWN
    if schedule.first:
        return f"stage {schedule.first - 1} is frozen; ends that are cut are trained whole"
    states = tuple(ends.makes.values())
    if kind is Kind.EXCHANGE and action.state not in states:
        names = ", ".join(state.value for state in states)
        return f"exchanges {action.state.value or 'nothing'}; expected one of {names}"
    if kind is not Kind.EXCHANGE and action.state:
        return f"moves {action.state.value}; expected nothing"
    first = kind.end == "first" or action.state is ends.enters
    end = schedule.begin(m) if first else schedule.end(m)
    if action.stage != end:
        return f"is of stage {action.stage}; expected {end}, an end of its microbatch's path"
    return ""
