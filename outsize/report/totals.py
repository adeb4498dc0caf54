"""Sums over a Trace: what each kind of action took, and how busy a lane was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outsize.trace import Trace, waiting


@dataclass(frozen=True)
class KindTotal:
    """All actions of one kind. share: of the seconds of all actions on all lanes (0 to 1). waited:
    seconds of them in which another worker had not begun."""

    kind: str
    count: int
    seconds: float
    share: float
    waited: float = 0.0

    @property
    def own(self) -> float:
        """Seconds without waiting."""
        return self.seconds - self.waited

    @property
    def mean(self) -> float:
        """Seconds an action."""
        return self.seconds / self.count


def totals(trace: Trace) -> tuple[KindTotal, ...]:
    """What each kind of action took, the longest first."""
    spent: dict[str, list[float]] = {}
    waited: dict[str, float] = {}
    for event, wait in zip(trace.events, waiting(trace), strict=True):
        spent.setdefault(event.kind, []).append(event.end - event.start)
        waited[event.kind] = waited.get(event.kind, 0.0) + wait
    whole = sum(map(sum, spent.values()))
    found = [
        KindTotal(kind, len(each), sum(each), sum(each) / whole if whole else 0.0, waited[kind])
        for kind, each in spent.items()
    ]
    return tuple(sorted(found, key=lambda total: (-total.seconds, total.kind)))


def computing(trace: Trace, lane: str = "compute") -> dict[int, float]:
    """By worker, the seconds in which a lane runs something, waiting for others not included."""
    spans: dict[int, list[tuple[float, float]]] = {worker: [] for worker in trace.workers}
    for event, wait in zip(trace.events, waiting(trace), strict=True):
        if event.lane == lane:
            spans[event.worker].append((event.start + wait, event.end))
    return {worker: _covered(each) for worker, each in spans.items()}


def busy(trace: Trace, lane: str) -> float:
    """The part of workers x makespan in which this lane ran something (0 to 1)."""
    whole = trace.span() * len(trace.workers)
    return sum(computing(trace, lane).values()) / whole if whole else 0.0


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union, so that overlapping actions count once."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
