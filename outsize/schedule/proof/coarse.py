"""Coarse lists of a pipeline as a Program: what each worker has of the step follows from its own
FORWARDs; it sends and receives in the thread that computes, and exchanges on a lane.

A worker that plays lanes at the same time only drops constraints of this play, so what ends here
ends there. Tensors bear the name of the stage whose output they are, or are the gradient of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outsize.errors import OutsizeError
from outsize.schedule.action import WHOLE, Action, Kind, Lane, State
from outsize.schedule.program import Program, Says, Talk
from outsize.schedule.proof.form import paths_of
from outsize.schedule.residency import Residency
from outsize.schedule.role import Role
from outsize.schedule.schedule import Schedule

_LINKS = {Kind.SEND: Kind.RECV, Kind.RECV: Kind.SEND}
_Tensor = tuple[Kind, State, int, int, int]


@dataclass(frozen=True)
class CoarseVoice:
    """Of a worker of `count`. ends: the worker of either end of a tensor's way."""

    worker: int
    count: int
    ends: Mapping[_Tensor, int]

    def says(self, schedule: Schedule) -> Says:
        """By place, what an action says to others."""
        return [self.of(action) for action in schedule.workers[0]]

    def of(self, action: Action) -> tuple[Talk, ...]:
        """What an action says."""
        if action.kind in _LINKS:
            other = self.ends.get(_end(action, _LINKS[action.kind]), self.worker)
            pair = (self.worker, other) if action.kind is Kind.SEND else (other, self.worker)
            return (Talk(pair, "stages", action.kind.lower()),)
        channels = {Kind.NORM: "compute", Kind.EXCHANGE: "exchange"}
        if action.kind in channels:
            return (Talk(tuple(range(self.count)), channels[action.kind], "all_reduce"),)
        return ()


def _end(action: Action, kind: Kind) -> _Tensor:
    return (kind, action.state, action.stage, action.microbatch, action.part)


def misled(voice: CoarseVoice, action: Action) -> str:
    """Why a tensor has no way between two workers, or nothing."""
    if action.kind not in _LINKS:
        return ""
    sends, (talk,) = action.kind is Kind.SEND, voice.of(action)
    other = voice.ends.get(_end(action, _LINKS[action.kind]))
    if other is None:
        return f"no worker {'receives' if sends else 'sends'} it"
    if other == voice.worker:
        return "both of its ends are on this worker"
    if sends and action.part not in (WHOLE, talk.ranks[1]):
        return f"is of worker {action.part}'s part; expected it to be received there"
    return ""


def lifted(schedule: Schedule, paths: Sequence[Sequence[int]]) -> Program:
    """The program of coarse lists. paths: the stages that each microbatch visits, where not all in
    order. OutsizeError: no worker, or paths that are none."""
    count = len(schedule.workers)
    if not count:
        raise OutsizeError("schedule: 0 workers; expected one at least")
    ways = paths_of(schedule, paths)
    ends: dict[_Tensor, int] = {}
    for worker, actions in enumerate(schedule.workers):
        for action in actions:
            if action.kind in _LINKS:
                ends.setdefault(_end(action, action.kind), worker)
    lists = tuple(_list(schedule, worker, ways if paths else ()) for worker in range(count))
    every = tuple(range(count))
    voices = tuple(CoarseVoice(worker, count, ends) for worker in every)
    return Program(lists, every, voices, every, (every,))


def _list(schedule: Schedule, worker: int, paths: Sequence[tuple[int, ...]]) -> Schedule:
    actions = schedule.workers[worker]
    plays = frozenset((a.stage, a.microbatch) for a in actions if a.kind.way == "forward")
    others = tuple(w for w in range(len(schedule.workers)) if w != worker)
    role = Role(plays, frozenset(s for s, _ in plays), tuple(paths), others)
    stages = range(schedule.stages)
    away = frozenset(stages) if any(a.kind in (Kind.EVICT, Kind.FETCH) for a in actions) else ()
    residency = Residency(tuple((s,) for s in stages), spills=frozenset(away))
    return replace(schedule, workers=(actions,), role=role, residency=residency)


def blocking(schedule: Schedule) -> Schedule:
    """A worker's coarse list with the lanes that it has in a coarse play."""
    (actions,) = schedule.workers
    lanes = ((Lane.EXCHANGE if a.kind is Kind.EXCHANGE else Lane.COMPUTE) for a in actions)
    moved = tuple(
        a if a.lane is lane else replace(a, lane=lane)
        for a, lane in zip(actions, lanes, strict=True)
    )
    return replace(schedule, workers=(moved,))
