"""Which sums over workers a schedule makes, for the validator: each once, with everything in it.

Of gradients that stay on the device: what is in the pool is followed by its versions (holding.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.schedule.action import WHOLE, Action, Kind, State
from outsize.schedule.passes.shard import adds
from outsize.schedule.residency import Residency, moved


class Sums:
    """Follows a schedule's list."""

    def __init__(self, residency: Residency, first: int) -> None:
        self.residency, self._first = residency, first
        self._own = residency.summed - residency.gradients
        self._added: set[int] = set()
        self._summed: set[int] = set()
        self._merged: set[int] = set()
        self._updated: dict[int, int] = {}
        self._collected: set[int] = set()

    def step(self, action: Action) -> str:
        """Go past an action; gives the reason why it cannot run, or nothing."""
        kind, s = action.kind, action.stage
        if kind is Kind.REDUCE:
            return self._reduce(s)
        if kind is Kind.MERGE:
            return self._merge(s)
        if kind is Kind.COLLECT:
            return self._collect(s)
        if kind is Kind.GATHER:
            return self._gather(s)
        if kind in (Kind.FETCH, Kind.EVICT):
            return self._alone(action)
        if kind is Kind.NORM:
            merged = sorted(self.residency.merged - self._merged)
            if merged:
                return f"comes before MERGE of stage {merged[0]}, which other workers hold too"
            return self._missing(sorted(self._own & self._added))
        if kind is Kind.UPDATE:
            self._updated[s] = self._updated.get(s, 0) + 1
            return self._missing([s] if s in self._own & self._added else [])
        return self._add(action) if adds(action, self._first) else ""

    def _add(self, action: Action) -> str:
        for s in self.residency.uses[action.stage]:
            if s in self._merged:
                return f"adds to gradients {s}, which were merged already"
            if s in self._summed:
                return f"adds to gradients {s}, which were summed over the workers already"
            if s in self._own:
                self._added.add(s)
        return ""

    def _missing(self, stages: list[int]) -> str:
        for s in stages:
            if s not in self._summed:
                return f"needs gradients {s}, which were not summed over the workers"
        return ""

    def _reduce(self, s: int) -> str:
        if s not in self.residency.summed:
            return f"sums gradients {s}, which are those of one worker"
        if s in self._merged:
            return f"sums gradients {s}, which were merged already"
        if s not in self._own:
            return ""
        if s in self._summed:
            return f"sums gradients {s} a second time"
        if s not in self._added:
            return f"sums gradients {s}, which no backward pass has made in this step"
        self._summed.add(s)
        return ""

    def _merge(self, s: int) -> str:
        if s not in self.residency.merged:
            return f"merges gradients {s}, which no other worker has"
        if s in self._merged:
            return f"merges gradients {s} a second time"
        self._merged.add(s)
        return self._missing([s] if s in self._own & self._added else [])

    def _gather(self, s: int) -> str:
        if s not in self.residency.gathered:
            return f"gathers parameters {s}, which are not cut over workers"
        if s in self._updated and s in self.residency.collected - self._collected:
            return f"gathers parameters {s}, whose updated parts were not collected"
        return ""

    def _collect(self, s: int) -> str:
        if s not in self.residency.collected:
            return f"collects parameters {s}, of which this worker updates all that it holds"
        if s in self._collected:
            return f"collects parameters {s} a second time"
        if self._updated.get(s, 0) < max(1, self.residency.parts.get(s, 0)):
            return f"collects parameters {s} before they are updated"
        self._collected.add(s)
        return ""

    def _alone(self, action: Action) -> str:
        """FETCH and EVICT move what is this worker's alone."""
        shared = {State.PARAMETERS: self.residency.gathered, State.GRADIENTS: self.residency.summed}
        cut = not self.residency.shared(moved(action))
        if cut and action.part == WHOLE and action.stage in shared.get(action.state, ()):
            wanted = Kind.GATHER if action.kind is Kind.FETCH else Kind.REDUCE
            return f"moves {action.state.value} that workers share; expected {wanted}"
        return ""

    def left(self) -> Iterator[str]:
        """What a whole step leaves undone."""
        for s in sorted(self.residency.collected & self._updated.keys() - self._collected):
            yield f"the updated parameters of stage {s} were not collected"
