"""Watchdog: who keeps the others waiting, from what all workers say and do.

A worker that computes for long is no culprit, nor one that waits for others. One that others wait
for, that itself waits for nobody and has got nothing done for PATIENCE seconds, hangs. Work is
processor time and bytes read or written; waiting for a disk or for a core counts as working.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outsize.launch.activity import GONE, STOPPED, Activity
from outsize.launch.board import Place
from outsize.launch.watched import named

PATIENCE = 5.0  # seconds that a worker may do nothing while others wait for it
STOP_PATIENCE = 3.0  # seconds that it may be stopped (SIGSTOP)
SILENCE = 6.0  # seconds that a worker of another machine may not be heard of
LOCKED = 30.0  # seconds that all may wait for one another: only a fault of this program does that
IDLE = 0.02  # processor seconds per second: what a thread that only looks at the clock takes
TRICKLE = 1 << 15  # bytes per second: what looking at itself makes a process read
GAP = 2.0  # seconds between looks after which the watcher itself was held up


@dataclass(frozen=True)
class Sample:
    """One worker as it was seen. heard: seconds since it was heard of (0 on the same machine);
    waited: seconds that it has waited for others (None: it does not wait)."""

    activity: Activity
    place: Place
    waited: float | None = None
    heard: float = 0.0


def seen(activity: Activity, place: Place, heard: float = 0.0) -> Sample:
    """A worker that is at `place` now."""
    spot = place.waits
    waited = None if spot is None else time.monotonic() - spot.since
    return Sample(activity, place, waited, heard)


@dataclass(frozen=True)
class Verdict:
    """Why the run ends. culprits: ranks; empty where all wait for one another. what: in words."""

    culprits: tuple[int, ...]
    what: str


@dataclass
class _Idle:
    since: float
    activity: Activity


@dataclass
class Watchdog:
    """Sees all workers again and again, a few times a second."""

    _idle: dict[int, _Idle] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)
    _last: float | None = None

    def look(self, now: float, samples: Sequence[Sample]) -> Verdict | None:
        """The verdict at a monotonic time in seconds, None as long as all is well. What has ended
        is not judged here."""
        if self._last is not None and now - self._last > GAP:
            self._idle.clear()
            self._stopped.clear()
        self._last = now
        for rank, sample in enumerate(samples):
            self._see(rank, now, sample.activity)
        return self._silent(samples) or self._halted(now, samples) or self._hung(now, samples)

    def _see(self, rank: int, now: float, activity: Activity) -> None:
        if activity.state != STOPPED:
            self._stopped.pop(rank, None)
        else:
            self._stopped.setdefault(rank, now)
        before = self._idle.get(rank)
        if before is None or activity.wants or _worked(before, now, activity):
            self._idle[rank] = _Idle(now, activity)

    def _silent(self, samples: Sequence[Sample]) -> Verdict | None:
        ranks = [r for r, s in enumerate(samples) if s.heard >= SILENCE]
        if not ranks:
            return None
        seconds = max(samples[r].heard for r in ranks)
        verb = "has" if len(ranks) == 1 else "have"
        what = f"{_each(ranks, samples)} {verb} not been heard of for {seconds:.1f} s"
        return Verdict(tuple(ranks), what + waiting(samples, ranks))

    def _halted(self, now: float, samples: Sequence[Sample]) -> Verdict | None:
        ranks = [r for r, since in self._stopped.items() if now - since >= STOP_PATIENCE]
        if not ranks:
            return None
        verb = "is" if len(ranks) == 1 else "are"
        what = f"{_each(ranks, samples)} {verb} stopped (SIGSTOP)"
        return Verdict(tuple(ranks), what + waiting(samples, ranks))

    def _hung(self, now: float, samples: Sequence[Sample]) -> Verdict | None:
        idle = {rank: now - seen.since for rank, seen in self._idle.items()}
        waited = {r: s.waited for r, s in enumerate(samples) if s.waited is not None}
        here = [r for r, s in enumerate(samples) if s.activity.state != GONE]
        heard = [r for r in here if samples[r].heard < PATIENCE / 2]
        ranks = [r for r in heard if r not in waited and idle[r] >= PATIENCE]
        if ranks and max(waited.values(), default=0.0) >= PATIENCE - 1:
            verb = "hangs" if len(ranks) == 1 else "hang"
            what = f"{_each(ranks, samples)} {verb}: nothing done for {idle[ranks[0]]:.1f} s"
            return Verdict(tuple(ranks), what + waiting(samples, ranks))
        if here and all(min(waited.get(r, 0.0), idle[r]) >= LOCKED for r in here):
            return Verdict((), "all workers wait for one another" + waiting(samples, ()))
        return None


def waiting(samples: Sequence[Sample], but: Sequence[int]) -> str:
    """ "; waiting: ranks 0, 2 in all_reduce with ranks 0 to 3", or nothing."""
    groups: dict[str, list[int]] = {}
    for rank, sample in enumerate(samples):
        spot = sample.place.waits
        if spot is not None and rank not in but:
            action = f" of {spot.action}" if spot.action else ""
            groups.setdefault(f"{spot.waits}{action}", []).append(rank)
    said = "; ".join(f"{named(ranks)} in {what}" for what, ranks in groups.items())
    return f"; waiting: {said}" if said else ""


def _worked(before: _Idle, now: float, activity: Activity) -> bool:
    seconds = 1.0 + now - before.since
    return (
        activity.seconds - before.activity.seconds > IDLE * seconds
        or activity.bytes - before.activity.bytes > TRICKLE * seconds
    )


def _each(ranks: Sequence[int], samples: Sequence[Sample]) -> str:
    """The culprits with where they are."""
    return " and ".join(f"rank {rank} (in {samples[rank].place})" for rank in ranks)
