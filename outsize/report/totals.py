"""Sums over a Trace: what each kind of action took, and how busy a lane was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outsize.trace import Trace


@dataclass(frozen=True)
class KindTotal:
    """All actions of one kind; share is of the seconds of all actions on all lanes (0 to 1)."""

    kind: str
    count: int
    seconds: float
    share: float

    @property
    def mean(self) -> float:
        """Seconds an action."""
        return self.seconds / self.count


def totals(trace: Trace) -> tuple[KindTotal, ...]:
    """What each kind of action took, the longest first."""
    spent: dict[str, list[float]] = {}
    for event in trace.events:
        spent.setdefault(event.kind, []).append(event.end - event.start)
    whole = sum(map(sum, spent.values()))
    found = [
        KindTotal(kind, len(each), sum(each), sum(each) / whole if whole else 0.0)
        for kind, each in spent.items()
    ]
    return tuple(sorted(found, key=lambda total: (-total.seconds, total.kind)))


def busy(trace: Trace, lane: str) -> float:
    """The part of workers x makespan in which this lane ran something (0 to 1)."""
    workers = {event.worker for event in trace.events}
    whole = trace.span() * len(workers)
    if not whole:
        return 0.0
    spent = (
        _covered((e.start, e.end) for e in trace.events if (e.worker, e.lane) == (worker, lane))
        for worker in workers
    )
    return sum(spent) / whole


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union, so that overlapping actions count once."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
