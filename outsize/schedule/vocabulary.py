"""A vocabulary that is cut over all workers of a pipeline: what its actions need and give.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. Every worker has a
part of the input and of the output layer. For each microbatch it does an EMBED before the first
stage's forward and an EMBED_BACKWARD behind its backward, an OUTPUT_S behind the last stage's
forward and an OUTPUT_T once the sums of all workers' S are known. An EXCHANGE puts together what
all workers have:

    activations   of EMBEDs: the embedding, for the first stage's forward
    sums          of OUTPUT_S: largest logits and sums of exponentials, for OUTPUT_T
    gradients     of OUTPUT_T: the gradient of the last stage's output, for its backward (variant 1)

In variant 2 an OUTPUT_S has already made its part of that gradient, up to a factor of each token
that the sums give, so that `sums` brings it along and the backward waits for one barrier, not two.
An EXCHANGE does not hold its worker up; what needs it waits until all workers have begun theirs.
They run in order on one lane, so all workers must have them in one order.

SEND and RECV with a part bring the last stage's output, or the gradient of the first stage's input,
to the worker which that part names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outsize.schedule.action import AHEAD, WHOLE, Action, Kind, Lane, State
from outsize.schedule.schedule import Schedule

INPUT = (Kind.EMBED, Kind.EMBED_BACKWARD)
OUTPUT = (Kind.OUTPUT_S, Kind.OUTPUT_T)
PASSES = (*INPUT, *OUTPUT)
Barrier = tuple[State, int, int]  # what is exchanged, the stage it is of, microbatch
Tensor = tuple[State, int, int, int]  # what, the stage it is of, microbatch, part
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def exchange(barrier: Barrier) -> Action:
    """A worker's EXCHANGE."""
    state, stage, microbatch = barrier
    return Action(Kind.EXCHANGE, stage, microbatch, Lane.NETWORK, state=state)


def barrier_behind(action: Action, variant: int) -> Barrier | None:
    """What is exchanged behind a pass."""
    given = {Kind.EMBED: State.ACTIVATIONS, Kind.OUTPUT_S: State.SUMS}
    if variant == 1:
        given[Kind.OUTPUT_T] = State.GRADIENTS
    state = given.get(action.kind)
    return None if state is None else (state, action.stage, action.microbatch)


def barrier_before(action: Action, path: Sequence[int], variant: int) -> Barrier | None:
    """The exchange that an action of a microbatch with this path waits for."""
    s, m = action.stage, action.microbatch
    if action.kind in AHEAD and s == path[0]:
        return (State.ACTIVATIONS, s, m)
    if action.kind in (Kind.OUTPUT_T, Kind.SAMPLE):
        return (State.SUMS, s, m)
    if action.kind in _BACK and s == path[-1]:
        return (State.GRADIENTS if variant == 1 else State.SUMS, s, m)
    return None


def part_before(action: Action, worker: int) -> Tensor | None:
    """The tensor that a pass needs beside what is exchanged."""
    state = {Kind.OUTPUT_S: State.ACTIVATIONS, Kind.EMBED_BACKWARD: State.GRADIENTS}
    if action.kind not in state:
        return None
    return (state[action.kind], action.stage, action.microbatch, worker)


def exchanged(schedule: Schedule, action: Action) -> State | None:
    """What an action takes of what all workers have put together; None: nothing."""
    m = action.microbatch
    if not schedule.vocabulary or m == WHOLE or action.kind in (Kind.SEND, Kind.RECV):
        return None
    ends = (schedule.begin(m), schedule.end(m))
    barrier = barrier_before(action, ends, schedule.vocabulary)
    return None if barrier is None else barrier[0]


def exchange_of(state: State, stage: int, m: int) -> Action:
    """An EXCHANGE in a worker's list, where it has a lane."""
    return replace(exchange((state, stage, m)), lane=Lane.EXCHANGE)
