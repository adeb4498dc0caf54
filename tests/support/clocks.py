"""Clocks that know nothing of the time: what a test sees of seconds is known beforehand."""

from __future__ import annotations

import threading

import pytest
import torch

from outsize.collectives import World, everyone
from outsize.runtime import engine, job
from outsize.simulate import shared_cores


class Ticks:
    """In place of the module `time`: each look is as much after the one before, of one thread."""

    def __init__(self, seconds: float) -> None:
        self._own, self._seconds = threading.local(), seconds

    def perf_counter(self) -> float:
        self._own.now = getattr(self._own, "now", 0.0) + self._seconds
        return self._own.now


class Clock:
    """What `paces` and jobs see in place of the time: each worker's own, which its work alone moves
    on. Workers are threads; a barrier makes all as late as the last of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._own, self._core, self._free = threading.local(), threading.Lock(), 0.0
        for module in (shared_cores, engine, job):
            patch.setattr(module, "time", self)
        patch.setattr(shared_cores, "everyone", self._timed)

    def perf_counter(self) -> float:
        return getattr(self._own, "now", 0.0)

    def works(self, seconds: float) -> None:
        """The calling worker works for so long, on a core of its own."""
        self._own.now = self.perf_counter() + seconds

    def works_in_turn(self, seconds: float) -> None:
        """On a core that all share."""
        with self._core:
            self._free = self._own.now = max(self.perf_counter(), self._free) + seconds

    def _timed(self, world: World) -> _Everyone:
        return _Everyone(self, everyone(world))


class _Everyone:
    def __init__(self, clock: Clock, inner: object) -> None:
        self._clock, self.all_reduce = clock, inner.all_reduce  # type: ignore[attr-defined]

    def barrier(self) -> None:
        now = torch.tensor(self._clock.perf_counter(), dtype=torch.float64)
        self._clock._own.now = float(self.all_reduce(now, "max"))
