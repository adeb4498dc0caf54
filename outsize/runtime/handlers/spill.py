"""FETCH and EVICT of activations, which rest below the device between FORWARD and BACKWARD."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from outsize.memory.store import Store
from outsize.plan import Plan
from outsize.runtime.engine import Deed
from outsize.runtime.points import Points
from outsize.runtime.spill import Entry, Spill, Spills
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind, State


class Spilling:
    """spills: those of a job."""

    kinds = ((Kind.FETCH, State.ACTIVATIONS), (Kind.EVICT, State.ACTIVATIONS))

    def __init__(
        self, spills: Spills, plan: Plan, stores: Mapping[str, Store], watch: Watch
    ) -> None:
        self.spills, self._plan, self._stores, self._watch = spills, plan, stores, watch
        self.missing: dict[tuple[int, int], list[Entry]] = {}
        self._leaving: set[tuple[int, int]] = set()

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        here = (action.stage, action.microbatch)
        if action.kind is Kind.FETCH:
            return Deed(partial(self._read, here), partial(self._allocate, here))
        return Deed(
            partial(self._write, here), partial(self._keep, here), partial(self._release, here)
        )

    def begin(self, points: Points) -> None:
        self._leaving = points.spilled

    def reset(self) -> None:
        self.spills.reset()
        self.missing.clear()

    def of(self, microbatch: int, stage: int) -> Spill | None:
        """What takes the activations that a stage keeps of a microbatch, where they leave."""
        if (stage, microbatch) not in self._leaving:
            return None
        here = self._plan.stages[stage]
        store = self._stores[here.rest.activations]
        return self.spills.begin(stage, microbatch, store, bool(here.spill))

    def _keep(self, here: tuple[int, int]) -> None:
        """A stage without blocks has kept nothing, and leaves with that."""
        stage, microbatch = here
        self.of(microbatch, stage)

    def _allocate(self, here: tuple[int, int]) -> None:
        with self._watch.kind("activations"):
            self.missing[here] = self.spills.of(*here).allocate()

    def _read(self, here: tuple[int, int]) -> None:
        self.spills.of(*here).read(self.missing.pop(here))

    def _write(self, here: tuple[int, int]) -> None:
        self.spills.of(*here).write()

    def _release(self, here: tuple[int, int]) -> None:
        self.spills.of(*here).release()
