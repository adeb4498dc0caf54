"""The prover: shows that a Schedule of one or many workers can run exactly, before anything does.

It plays every worker's list in order without computing. A SEND waits while its link's buffers are
full, a RECV until its tensor has come; nothing else waits. Every tensor must be made once, before
it is used and on the worker that uses it, or be sent there; tensors from one worker to another are
received in the order in which they are sent; every gradient enters the update once; nothing is left
over; no worker holds more bytes than its budget. The first fault is the error, with its reason.

A worker that plays lanes at the same time only drops constraints of this play, so what ends here
ends there. Tensors bear the name of the stage whose output they are, or are the gradient of.
Vocabularies that are cut over the workers add barriers (vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outsize.errors import OutsizeError
from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.away import MOVED, Away
from outsize.schedule.form import MOVES, malformed, paths_of
from outsize.schedule.links import BUFFERS, Links
from outsize.schedule.schedule import Schedule
from outsize.schedule.vocabulary import PASSES, Barriers, Tensor, part_before

_AHEAD = (Kind.FORWARD, Kind.PREFILL, Kind.DECODE)
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_TABLES = (*PASSES, Kind.EXCHANGE)


@dataclass(frozen=True)
class Proof:
    """peaks: the most bytes on each worker's device tier. holders: the workers of each stage."""

    peaks: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]


def prove(
    schedule: Schedule,
    budget: int | None = None,
    static: int = 0,
    paths: Sequence[Sequence[int]] = (),
    buffers: int = BUFFERS,
) -> Proof:
    """Refuse a schedule that cannot run exactly.

    budget: bytes that each worker's device tier may hold. static: those live throughout. paths: the
    stages that each microbatch visits, where not all in order. buffers: of each link.
    """
    play = _Play(schedule, paths_of(schedule, paths), static, buffers)
    at = [0] * len(schedule.workers)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(schedule.workers):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                if play.waits(worker, action):
                    break
                reason = malformed(schedule, action) or play.step(worker, action)
                reason = reason or play.over(worker, budget)
                _refuse(worker, at[worker], action, reason)
                at[worker] += 1
                moved = True
    ends = [
        (w, actions[i]) for w, actions in enumerate(schedule.workers) if (i := at[w]) < len(actions)
    ]
    if ends:  # who waits for all workers knows best why nobody goes on
        worker, action = min(ends, key=lambda end: not play.barriers.waits(end[1]))
        _refuse(worker, at[worker], action, play.stuck(worker, action))
    reason = play.left()
    if reason:
        raise OutsizeError(f"schedule: at its end: {reason}")
    return Proof(tuple(play.peaks), play.holders)


def _refuse(worker: int, position: int, action: Action, reason: str) -> None:
    if reason:
        raise OutsizeError(f"schedule: worker {worker}, action {position} ({action}): {reason}")


@dataclass
class _Play:
    """What has been made so far, where it lies, and what is on its way."""

    schedule: Schedule
    paths: list[tuple[int, ...]]
    static: int
    buffers: int
    live: list[int] = field(init=False)
    peaks: list[int] = field(init=False)
    done: dict[tuple[Kind, State, int, int, int, int], int] = field(default_factory=dict)
    here: set[tuple[int, Tensor]] = field(default_factory=set)  # tensors by worker
    unused: set[tuple[int, Tensor]] = field(default_factory=set)  # received, and not used so far

    def __post_init__(self) -> None:
        workers = self.schedule.workers
        self.live, self.peaks = [self.static] * len(workers), [self.static] * len(workers)
        self.links = Links(self.schedule, self.buffers)
        held: list[set[int]] = [set() for _ in range(self.schedule.stages)]
        for worker, actions in enumerate(workers):
            for a in actions:
                if a.kind in _AHEAD and 0 <= a.stage < self.schedule.stages:
                    held[a.stage].add(worker)
        self.holders = tuple(tuple(sorted(workers)) for workers in held)
        self.norms = [sum(a.kind is Kind.NORM for a in actions) for actions in workers]
        self.reached: set[int] = set()  # workers that have come to their NORM
        self.barriers = Barriers(self.schedule, self.paths)
        self.away = Away()

    # One action

    def waits(self, worker: int, action: Action) -> bool:
        """Whether another worker must do something first."""
        if action.kind is Kind.NORM:
            self.reached.add(worker)
            return len(self.reached) < sum(map(bool, self.norms))
        if action.kind in MOVES:
            return self.links.waits(worker, action)
        return self.barriers.waits(action)

    def step(self, worker: int, action: Action) -> str:
        """Play one action; gives the reason why it cannot run, or nothing."""
        each = action.kind in (Kind.NORM, Kind.UPDATE, *_TABLES)  # once on each worker
        key = (*action.key, worker if each else WHOLE)
        if key in self.done:
            before = self.done[key]
            return f"runs a second time; worker {before} has done it"
        reason = self._needs(worker, action)
        self.done[key] = worker
        self.peaks[worker] = max(self.peaks[worker], self.live[worker] + action.workspace)
        self.live[worker] += sum(n for where, n in action.allocates if where.startswith("device/"))
        self.peaks[worker] = max(self.peaks[worker], self.live[worker])
        return reason

    def over(self, worker: int, budget: int | None) -> str:
        """How far above its budget a worker is."""
        peak = self.peaks[worker]
        if budget is None or peak <= budget:
            return ""
        return f"would hold {peak} bytes of a budget of {budget}: {peak - budget} missing"

    def _needs(self, worker: int, action: Action) -> str:
        kind = action.kind
        if kind in MOVES:
            return self.links.step(worker, action, self.here, self.unused)
        if kind is Kind.NORM:
            return self._gradients_missing(worker) or self.barriers.missing(worker)
        if kind is Kind.UPDATE:
            return self._update(worker, action.stage)
        if action.stage not in self.paths[action.microbatch]:
            return f"microbatch {action.microbatch} does not visit stage {action.stage}"
        if self._did(Kind.NORM, WHOLE, WHOLE, worker) is not None:
            return "comes after NORM, which has summed the gradients already"
        if kind in _TABLES:
            return self._table(worker, action)
        if kind in MOVED:
            return self.away.step(worker, action, self._did)
        if kind in _AHEAD:
            return self._forward(worker, action)
        return self.away.reads(action) or self._backward(worker, action)

    def _table(self, worker: int, action: Action) -> str:
        """A pass or an exchange of a cut vocabulary."""
        needed = part_before(action, worker)
        if needed is not None and not self._use(worker, needed):
            what = f"{needed[0].value} of stage {action.stage}"
            return f"its input, {what}, is not on worker {worker}"
        return self.barriers.step(worker, action)

    def _did(self, kind: Kind, stage: int, microbatch: int, where: int = WHOLE) -> int | None:
        """The worker that has done an action."""
        return self.done.get((kind, State.NONE, stage, microbatch, WHOLE, where))

    def _gradient_by(self, stage: int, microbatch: int) -> int | None:
        did = (self._did(kind, stage, microbatch) for kind in _BACK)
        return next((worker for worker in did if worker is not None), None)

    def _neighbours(self, stage: int, microbatch: int) -> tuple[int, int]:
        """The stages before and behind on the microbatch's path; WHOLE where there is none."""
        path = self.paths[microbatch]
        at = path.index(stage)
        return (path[at - 1] if at else WHOLE, path[at + 1] if at + 1 < len(path) else WHOLE)

    def _use(self, worker: int, tensor: Tensor) -> bool:
        self.unused.discard((worker, tensor))
        return (worker, tensor) in self.here

    def _forward(self, worker: int, action: Action) -> str:
        s, m = action.stage, action.microbatch
        before, behind = self._neighbours(s, m)
        if before != WHOLE and not self._use(worker, (State.ACTIVATIONS, before, m, WHOLE)):
            return f"its input, the output of stage {before}, is not on worker {worker}"
        part = worker if behind == WHOLE else WHOLE  # for its own part of a cut vocabulary
        self.here.add((worker, (State.ACTIVATIONS, s, m, part)))
        return ""

    def _backward(self, worker: int, action: Action) -> str:
        kind, s, m = action.kind, action.stage, action.microbatch
        first = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD_WEIGHT else Kind.FORWARD
        where = self._did(first, s, m)
        if where is None:
            return f"comes before its {first}"
        if where != worker:
            return f"its {first} was on worker {where}, which holds what it needs"
        if kind is Kind.BACKWARD_WEIGHT:
            return ""
        if kind is Kind.RECOMPUTE:
            fine = s in self.schedule.recompute and self._gradient_by(s, m) is None
            return "" if fine else "its activations are there, or are not needed any more"
        return self._gradient(worker, action)

    def _gradient(self, worker: int, action: Action) -> str:
        s, m = action.stage, action.microbatch
        before, behind = self._neighbours(s, m)
        other = Kind.BACKWARD if action.kind is Kind.BACKWARD_INPUT else Kind.BACKWARD_INPUT
        if self._did(other, s, m) is not None:
            return "its gradient was produced already"
        if s in self.schedule.recompute and self._did(Kind.RECOMPUTE, s, m) is None:
            return "its activations were not computed again"
        if behind != WHOLE and not self._use(worker, (State.GRADIENTS, s, m, WHOLE)):
            return f"its gradient, from stage {behind}, is not on worker {worker}"
        if before == WHOLE:
            self.here.add((worker, (State.GRADIENTS, s, m, worker)))
        elif before >= self.schedule.first:
            self.here.add((worker, (State.GRADIENTS, before, m, WHOLE)))
        return ""

    # The step's end

    def _gradients_missing(self, worker: int) -> str:
        """What of the microbatches that a worker has run forward did not come back."""
        for (kind, _, s, m, _, _), where in self.done.items():
            if kind is Kind.FORWARD and where == worker and s >= self.schedule.first:
                if self._gradient_by(s, m) is None:
                    return f"the gradient of stage {s}, microbatch {m} was not produced"
                split = self._did(Kind.BACKWARD_INPUT, s, m) is not None
                if split and self._did(Kind.BACKWARD_WEIGHT, s, m) is None:
                    return f"the weight gradient of stage {s}, microbatch {m} was not produced"
        return ""

    def _update(self, worker: int, stage: int) -> str:
        if self._did(Kind.NORM, WHOLE, WHOLE, worker) is None:
            return "comes before NORM"
        if stage != WHOLE and worker not in self.holders[stage]:
            return f"stage {stage} is not on worker {worker}"
        return ""

    def stuck(self, worker: int, action: Action) -> str:
        """Why a worker cannot go on at the end."""
        if action.kind is Kind.NORM:
            late = next(w for w, n in enumerate(self.norms) if n and w not in self.reached)
            return f"waits for NORM of worker {late}, which does not come: deadlock"
        if action.kind in MOVES:
            return self.links.stuck(action)
        return self.barriers.stuck(action)

    def left(self) -> str:
        """What a whole step still lacks, or has too much."""
        kinds = {key[0] for key in self.done}
        ahead = sorted(kinds & set(_AHEAD))
        if len(ahead) != 1:
            return (
                f"it holds {' and '.join(ahead) or 'no forward'}; expected one of {_AHEAD[0]}, .."
            )
        for m, path in enumerate(self.paths):
            for s in path:
                if self._did(Kind(ahead[0]), s, m) is None:
                    return f"{ahead[0]} of stage {s}, microbatch {m} is missing"
        for worker, (state, stage, microbatch, _) in sorted(self.unused):
            return f"worker {worker} has no use for {state.value} {stage} {microbatch}"
        return self._updates_missing() if ahead[0] is Kind.FORWARD else ""

    def _updates_missing(self) -> str:
        for worker, count in enumerate(self.norms):
            if not count and self.schedule.workers[worker]:
                return f"NORM of worker {worker} is missing"
        for s in range(self.schedule.first, self.schedule.stages):
            for worker in self.holders[s]:
                if self._did(Kind.UPDATE, s, WHOLE, worker) is None:
                    return f"UPDATE of stage {s} on worker {worker} is missing"
        for worker in range(len(self.norms) if self.schedule.vocabulary else 0):
            if self._did(Kind.UPDATE, WHOLE, WHOLE, worker) is None:
                return f"UPDATE of the vocabulary's part on worker {worker} is missing"
        return ""
