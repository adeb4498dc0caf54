"""The pass that gives one worker with a whole vocabulary the passes of a cut one."""

from __future__ import annotations

from dataclasses import replace

from outsize.schedule.action import Action, Kind, State
from outsize.schedule.schedule import Schedule
from outsize.schedule.vocabulary import exchange_of

_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def alone(schedule: Schedule, head: int, variant: int) -> Schedule:
    """The list of one worker that has a whole vocabulary, in the passes of a cut one. head: the
    stage that has the head's rows; the first one has the embedding's."""
    made: list[Action] = []
    for action in schedule.workers[0]:
        m, first = action.microbatch, action.stage == 0
        if action.kind is Kind.FORWARD and first:
            made += [Action(Kind.EMBED, 0, m), exchange_of(State.ACTIVATIONS, 0, m)]
        made.append(action)
        if action.kind is Kind.FORWARD and action.stage == schedule.stages - 1:
            made += [Action(Kind.OUTPUT_S, head, m), exchange_of(State.SUMS, head, m)]
            made.append(Action(Kind.OUTPUT_T, head, m))
            made += [exchange_of(State.GRADIENTS, head, m)] if variant == 1 else []
        elif action.kind in _BACK and first:
            made.append(Action(Kind.EMBED_BACKWARD, 0, m))
    return replace(schedule, workers=(tuple(made),), vocabulary=variant)
