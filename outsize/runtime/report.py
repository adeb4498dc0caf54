"""Report: what one step gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outsize.runtime.engine import Ran
from outsize.runtime.loss_scale import LossScale
from outsize.trace.trace import Trace


@dataclass(frozen=True)
class Report:
    """loss: mean over valid targets, by their weights; norm: of the whole gradient, before
    clipping; count: valid targets; ran: the actions as they ran, in seconds from `begin`
    (time.perf_counter); scaling: of the next step's losses, where they are scaled: a step that it
    skipped has a norm that is not finite."""

    loss: float
    norm: float
    count: int
    seconds: float
    ran: Sequence[Ran]
    begin: float
    scaling: LossScale | None = None

    @cached_property
    def trace(self) -> Trace:
        """The actions as they ran."""
        return Trace("measured", tuple(ran.event() for ran in self.ran), begin=self.begin)
