"""The pass that lets workers share a stage's states that stay on the device: REDUCE and COLLECT.

Gradients that every worker has whole are summed behind the last action that adds to them (so while
other stages still compute: the buckets of Li et al., "PyTorch Distributed", 2020, are stages), and
parameters that one worker has updated are collected behind the update. What passes through the
pool is gathered and reduced by the pass that lets it pass (offload.py).
"""

from __future__ import annotations

from dataclasses import replace

from outsize.schedule.action import Action, Kind, Lane, State
from outsize.schedule.residency import Residency
from outsize.schedule.schedule import Schedule


def adds(action: Action, first: int) -> bool:
    """Whether an action adds to gradients of weights. first: the first stage that is trained."""
    return action.kind.adds and action.stage >= first


def spread(schedule: Schedule, residency: Residency) -> Schedule:
    """The schedule with its sums and collections inserted. residency: what is shared."""
    summed = residency.summed - residency.gradients
    last: dict[int, int] = {}
    updated: dict[int, int] = {}
    for index, action in enumerate(schedule.workers[0]):
        if adds(action, schedule.first):
            last |= {s: index for s in residency.uses[action.stage] if s in summed}
        elif action.kind is Kind.UPDATE and action.stage in residency.collected:
            updated[action.stage] = index
    after: dict[int, list[Action]] = {}
    for stage, index in last.items():
        after.setdefault(index, []).append(_shared(Kind.REDUCE, stage, State.GRADIENTS))
    for stage, index in updated.items():
        after.setdefault(index, []).append(_shared(Kind.COLLECT, stage, State.PARAMETERS))
    worker: list[Action] = []
    for index, action in enumerate(schedule.workers[0]):
        worker += [action, *after.get(index, ())]
    held = schedule.residency or residency
    return replace(schedule, workers=(tuple(worker),), residency=held)


def _shared(kind: Kind, stage: int, state: State) -> Action:
    return Action(kind, stage, lane=Lane.NETWORK, state=state)
