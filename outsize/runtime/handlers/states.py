"""FETCH, EVICT, GATHER, REDUCE, COLLECT and MERGE: states of stages between tiers and workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outsize.runtime.engine import Deed
from outsize.runtime.points import Points
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.schedule import Action, Kind
from outsize.schedule.residency import moved


class Movement:
    """Of what a weight_pool holds."""

    kinds = (Kind.FETCH, Kind.EVICT, Kind.GATHER, Kind.REDUCE, Kind.COLLECT, Kind.MERGE)

    def __init__(self, weight_pool: WeightPool) -> None:
        self.weight_pool = weight_pool

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        weight_pool, stage = self.weight_pool, action.stage
        match action.kind:
            case Kind.FETCH:
                return Deed(partial(weight_pool.fetch, moved(action)))
            case Kind.GATHER:
                return Deed(partial(weight_pool.gather, moved(action)))
            case Kind.EVICT:
                return Deed(partial(weight_pool.evict, moved(action)))
            case Kind.REDUCE:
                return Deed(partial(weight_pool.reduce, stage, index in points.sums))
            case Kind.MERGE:
                return Deed(partial(weight_pool.merge, stage))
            case _:
                return Deed(partial(weight_pool.collect, stage))

    def begin(self, points: Points) -> None:
        self.weight_pool.ensure(points.start)

    def reset(self) -> None:
        """Nothing in the pool can be relied on, and no half-summed gradient remains."""
        self.weight_pool.forget()
        for index in range(len(self.weight_pool.chunks)):
            self._zero(index)

    def anew(self, index: int, points: Points) -> Callable[[], None] | None:
        """Gradients that pass through the pool begin where something else was."""
        stages = points.anew.get(index, ())
        return partial(self._empty, tuple(stages)) if stages else None

    def _empty(self, stages: tuple[int, ...]) -> None:
        for stage in stages:
            for index in self.weight_pool.placement.chunks.of_stage[stage]:
                self._zero(index)

    def _zero(self, index: int) -> None:
        gradients = self.weight_pool.chunks[index].gradients
        if gradients is not None:
            gradients.zero_()
