"""Trace: when each action ran and how many bytes each tier held.

The simulator writes it (source "predicted") and so does the runtime (source "measured"), in the
same form, so that the two lie over each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran. Times in seconds from the start of the trace."""

    worker: int
    lane: str
    kind: str
    stage: int  # -1: the whole model
    microbatch: int  # -1: the whole step
    start: float
    end: float
    live: Mapping[str, int] = field(default_factory=dict)  # bytes by "tier/kind" after the action
    peak: int = 0  # highest bytes on the device tier while it ran; 0 where not measured
    part: int = -1  # -1: the whole stage

    @property
    def name(self) -> str:
        """Short label, as "FORWARD s2 m0"."""
        part = "" if self.part < 0 else f"#{self.part}"
        stage = "" if self.stage < 0 else f" s{self.stage}{part}"
        microbatch = "" if self.microbatch < 0 else f" m{self.microbatch}"
        return f"{self.kind}{stage}{microbatch}"


@dataclass(frozen=True)
class Trace:
    """Events in order of their start, per worker and lane.

    begin: what time.perf_counter() said at second 0, where that is known; of no use to another run,
    so files do not have it and equal traces may differ in it.
    """

    source: Literal["predicted", "measured"]
    events: tuple[Event, ...]
    meta: Mapping[str, str] = field(default_factory=dict)
    begin: float | None = field(default=None, compare=False)

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that have events, in order."""
        return tuple(sorted({event.worker for event in self.events}))

    def span(self) -> float:
        """Seconds from the first start to the last end: the makespan."""
        if not self.events:
            return 0.0
        return max(e.end for e in self.events) - min(e.start for e in self.events)

    def peak(self) -> int:
        """Highest bytes on the device tier."""
        return max((e.peak for e in self.events), default=0)
