"""FETCH, EVICT, GATHER, REDUCE, COLLECT and MERGE: states of stages between tiers and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from outsize.runtime.engine import Deed
from outsize.runtime.points import Points
from outsize.runtime.weights import Weights
from outsize.schedule import Action, Kind
from outsize.schedule.residency import moved

if TYPE_CHECKING:
    from outsize.runtime.storage.weight_pool import WeightPool

Square = Callable[[Iterable[int]], None]


class Arrivals:
    """What comes into rooms, for whoever computes with it."""

    kinds = (Kind.FETCH, Kind.GATHER)

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        bring = self._weights.fetch if action.kind is Kind.FETCH else self._weights.gather
        return Deed(partial(bring, moved(action)))

    def begin(self, points: Points) -> None:
        self._weights.ensure(points.start)

    def reset(self) -> None:
        self._weights.forget()


class Movement:
    """What leaves a weight_pool's rooms, and what workers bring each other of it. square: takes the
    norms of stages' gradients."""

    kinds = (Kind.EVICT, Kind.REDUCE, Kind.COLLECT, Kind.MERGE)

    def __init__(self, weight_pool: WeightPool, square: Square | None = None) -> None:
        self.weight_pool, self._square = weight_pool, square

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        weight_pool, stage = self.weight_pool, action.stage
        match action.kind:
            case Kind.EVICT:
                return Deed(partial(weight_pool.evict, moved(action)))
            case Kind.REDUCE:
                last = index in points.sums
                reduce = partial(weight_pool.reduce, stage, last)
                leaves = last and stage in points.at_reduce
                return Deed(partial(self._leave, reduce, stage) if leaves else reduce)
            case Kind.MERGE:
                return Deed(partial(weight_pool.merge, stage))
            case _:
                return Deed(partial(weight_pool.collect, stage))

    def _leave(self, reduce: Callable[[], None], stage: int) -> None:
        """Sum gradients whose share goes below next: their norm is taken before."""
        assert self._square is not None, "a list with sums has a norm"
        reduce()
        self._square((stage,))

    def begin(self, points: Points) -> None:
        """What a list expects to find has arrived."""

    def reset(self) -> None:
        """No half-summed gradient remains."""
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
