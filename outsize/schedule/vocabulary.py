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

from collections import defaultdict
from collections.abc import Sequence

from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
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
    if action.kind is Kind.FORWARD and s == path[0]:
        return (State.ACTIVATIONS, s, m)
    if action.kind is Kind.OUTPUT_T:
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


class Barriers:
    """The part of the prover's play that is of a cut vocabulary."""

    def __init__(self, schedule: Schedule, paths: Sequence[tuple[int, ...]]) -> None:
        self.schedule, self.paths = schedule, paths
        self.arrived: dict[Barrier, set[int]] = defaultdict(set)
        self.order: list[Barrier] = []  # of exchanges, the same on all workers
        self.count = [0] * len(schedule.workers)
        self.done: set[tuple[int, Kind, int]] = set()  # passes by worker and microbatch

    def waits(self, action: Action) -> bool:
        """Whether other workers' part of what an action needs is still to come."""
        barrier = self._before(action)
        return barrier is not None and len(self.arrived[barrier]) < len(self.count)

    def _before(self, action: Action) -> Barrier | None:
        if not self.schedule.vocabulary or not 0 <= action.microbatch < len(self.paths):
            return None
        path = self.paths[action.microbatch]
        return barrier_before(action, path, self.schedule.vocabulary)

    def step(self, worker: int, action: Action) -> str:
        """Play a pass or an exchange; gives the reason why it cannot run, or nothing."""
        path = self.paths[action.microbatch]
        first = action.kind in INPUT or action.state is State.ACTIVATIONS
        end = path[0] if first else path[-1]
        if action.stage != end:
            return f"is of stage {action.stage}; expected {end}, an end of its microbatch's path"
        if action.kind is Kind.EXCHANGE:
            return self._exchange(worker, action)
        scored = (worker, Kind.OUTPUT_S, action.microbatch) in self.done
        if action.kind is Kind.OUTPUT_T and not scored:
            return "comes before its OUTPUT_S"
        self.done.add((worker, action.kind, action.microbatch))
        return ""

    def _exchange(self, worker: int, action: Action) -> str:
        barrier = (action.state, action.stage, action.microbatch)
        maker = {
            State.ACTIVATIONS: Kind.EMBED,
            State.SUMS: Kind.OUTPUT_S,
            State.GRADIENTS: Kind.OUTPUT_T,
        }[action.state]
        if (worker, maker, action.microbatch) not in self.done:
            return f"comes before its {maker}"
        turn = self.count[worker]
        if turn == len(self.order):
            self.order.append(barrier)
        elif self.order[turn] != barrier:
            state, stage, microbatch = self.order[turn]
            other = min(self.arrived[self.order[turn]])
            return (
                f"worker {other} exchanges {state.value} {stage} {microbatch} in its place;"
                " expected one order on all workers"
            )
        self.count[worker] += 1
        self.arrived[barrier].add(worker)
        return ""

    def missing(self, worker: int) -> str:
        """What a worker has left out of the gradients of its part."""
        if not self.schedule.vocabulary:
            return ""
        for m in range(self.schedule.microbatches):
            for kind in (Kind.OUTPUT_T, Kind.EMBED_BACKWARD):
                if (worker, kind, m) not in self.done:
                    return f"{kind} of microbatch {m} was not done"
        return ""

    def stuck(self, action: Action) -> str:
        """Why an action that waits can never run; nothing where it waits for something else."""
        barrier = self._before(action)
        if barrier is None:
            return ""
        late = next(w for w in range(len(self.count)) if w not in self.arrived[barrier])
        state, stage, microbatch = barrier
        return (
            f"waits for worker {late}'s EXCHANGE.{state.value} {stage} {microbatch}, which does"
            " not come: deadlock"
        )


def misfit(schedule: Schedule, action: Action) -> str:
    """What is wrong with an action by itself, where that has to do with a cut vocabulary."""
    kind, variant = action.kind, schedule.vocabulary
    if action.part != WHOLE and not (variant and kind in (Kind.SEND, Kind.RECV)):
        return "has a part; expected one in sends and receives of a cut vocabulary alone"
    if kind not in (*PASSES, Kind.EXCHANGE):
        return ""
    if not variant:
        return "is of a cut vocabulary; the schedule has none"
    if schedule.first:
        return f"stage {schedule.first - 1} is frozen; a cut vocabulary is trained whole"
    states = (State.ACTIVATIONS, State.SUMS, *((State.GRADIENTS,) if variant == 1 else ()))
    if kind is Kind.EXCHANGE and action.state not in states:
        names = ", ".join(state.value for state in states)
        return f"exchanges {action.state.value or 'nothing'}; expected one of {names}"
    return ""
