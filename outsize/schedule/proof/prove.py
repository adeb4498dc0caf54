"""The prover: shows that a Program of one or many workers can run exactly, before anything does.

Each list is played alone first (alone.py): inputs, gradients, the pool, sums, bytes. Then all are
played together (together.py): sends and receives, collectives, buffers and lanes. Between the two,
no stage of a microbatch may be computed twice or nowhere. The first fault is the error, with its
worker, place and reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.schedule.action import WHOLE, Kind
from outsize.schedule.program import BUFFERS, Program
from outsize.schedule.proof.alone import Alone
from outsize.schedule.proof.coarse import CoarseVoice, blocking, lifted, misled
from outsize.schedule.proof.form import coarse_misfit, misfit
from outsize.schedule.proof.together import together
from outsize.schedule.residency import MOVES
from outsize.schedule.schedule import Schedule


@dataclass(frozen=True)
class Proof:
    """peaks: the most bytes on each worker's device tier."""

    peaks: tuple[int, ...]


def prove(
    what: Schedule | Program,
    budget: int | None = None,
    static: int = 0,
    paths: Sequence[Sequence[int]] = (),
    buffers: int = BUFFERS,
) -> Proof:
    """Refuse what cannot run exactly: a Program; the coarse lists of a pipeline; or one worker's
    list, whose sends and receives are then taken to be answered.

    budget: bytes that each worker's device tier may hold. static: those live throughout. paths: of
    coarse lists, the stages that each microbatch visits, where not all in order. buffers: of each
    link.
    """
    if isinstance(what, Schedule):
        if not _coarse(what):
            return Proof((_Listed(what, "0", None).prove(budget, static),))
        what = lifted(what, paths)
    used = sorted(set(what.which))
    peaks = {}
    for index in used:
        rank = what.which.index(index)
        voice = what.voices[rank]
        coarse = voice if isinstance(voice, CoarseVoice) else None
        peaks[index] = _Listed(what.lists[index], str(rank), coarse).prove(budget, static)
    _once(what)
    seen = [
        blocking(made) if isinstance(what.voices[0], CoarseVoice) else None for made in what.lists
    ]
    together(what, buffers, seen)
    return Proof(tuple(peaks[index] for index in what.which))


def _coarse(schedule: Schedule) -> bool:
    """Whether lists are of a pipeline's schedule, in which losses are a part of the last stage's
    FORWARD; not what a worker runs."""
    if len(schedule.workers) != 1:
        return True
    if schedule.role is not None or schedule.residency is not None:
        return False
    whole = (Kind.FORWARD, schedule.loses)
    return any(a.kind in MOVES or (a.kind, a.stage) == whole for a in schedule.workers[0])


@dataclass(frozen=True)
class _Listed:
    """One worker's list. name: the worker's in errors. coarse: its voice, of a coarse list."""

    schedule: Schedule
    name: str
    coarse: CoarseVoice | None

    def prove(self, budget: int | None, static: int) -> int:
        """Refuse a list that cannot run by itself; gives its peak bytes on the device tier."""
        (actions,) = self.schedule.workers
        state = Alone(self.schedule, static)
        reason = state.holding.begin()
        if reason:
            raise OutsizeError(f"schedule: {reason}")
        for place, action in enumerate(actions):
            if self.coarse is None:
                reason = misfit(self.schedule, action)
            else:
                reason = coarse_misfit(self.schedule, action, self.coarse.worker)
                reason = reason or misled(self.coarse, action)
            reason = reason or state.step(action) or _over(state.peak, budget)
            if reason:
                where = f"worker {self.name}, action {place} ({action})"
                raise OutsizeError(f"schedule: {where}: {reason}")
        reason = state.finish() if actions or self.coarse is None else ""
        if self.coarse is not None:
            reason = reason or self._ends_missing()
            reason = reason and f"{reason} on worker {self.name}"
        if reason:
            raise OutsizeError(f"schedule: at its end: {reason}")
        return state.peak

    def _ends_missing(self) -> str:
        """Of a coarse list whose ends are cut, the update of the worker's part of them."""
        updated = any(a.kind is Kind.UPDATE and a.stage == WHOLE for a in self.schedule.workers[0])
        trains = any(a.kind is Kind.NORM for a in self.schedule.workers[0])
        missing = self.schedule.ends if trains and not updated else None
        return f"UPDATE of the {missing.name}'s part is missing" if missing else ""


def _over(peak: int, budget: int | None) -> str:
    """How far above its budget a worker is."""
    if budget is None or peak <= budget:
        return ""
    return f"would hold {peak} bytes of a budget of {budget}: {peak - budget} missing"


def _once(program: Program) -> None:
    """Refuse stages of microbatches that no worker of a replica computes, or several do."""
    for lists in {tuple(program.which[rank] for rank in replica) for replica in program.replicas}:
        roles = [role for index in lists if (role := program.lists[index].role) is not None]
        if not roles:
            continue
        made, paths = program.lists[lists[0]], roles[0].paths
        plain = tuple(range(made.stages))
        every = [(s, m) for m in range(made.microbatches) for s in (paths[m] if paths else plain)]
        count = Counter(pair for role in roles for pair in role.plays)
        for s, m in every:
            if count[s, m] != 1:
                found = f"is on {count[s, m]} workers" if count[s, m] else "is missing"
                raise OutsizeError(f"schedule: at its end: stage {s}, microbatch {m} {found}")
