"""The pass that gives one worker, alone, the passes that all workers of a pipeline do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from outsize.schedule.action import Action, Kind
from outsize.schedule.ends import Ends, exchange
from outsize.schedule.schedule import Schedule


def alone(schedule: Schedule, head: int, ends: Ends) -> Schedule:
    """The list of one worker that has whole layers, in the passes of cut ones: of a step, or of an
    evaluation, which has the first at each end. head: the stage that has what the last layer
    multiplies by; the first one has the first layer's."""
    kinds = ends.ahead if schedule.first == schedule.stages else ends.passes

    def passes(wanted: Iterable[Kind], stage: int, m: int) -> Iterator[Action]:
        for kind in (kind for kind in wanted if kind in kinds):
            yield Action(kind, stage, m)
            if kind in ends.makes:
                yield exchange(ends.makes[kind], stage, m)

    made: list[Action] = []
    begin, *behind = ends.at("first")
    for action in schedule.workers[0]:
        m, first = action.microbatch, action.stage == 0
        if action.kind.way == "forward" and first:
            made += passes((begin,), 0, m)
        made.append(replace(action, kind=Kind.FORWARD) if action.kind is Kind.LOSS else action)
        if action.kind.way == "forward" and action.stage == schedule.stages - 1:
            made += passes(ends.at("last"), head, m)
        elif action.kind.way == "back" and action.stage == schedule.first:
            made += passes(behind, 0, m)
    return replace(schedule, workers=(tuple(made),), ends=ends)
