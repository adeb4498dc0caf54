"""FORWARD, LOSS, RECOMPUTE and BACKWARD, PREFILL and DECODE: the model's stages on a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from outsize.runtime.engine import Deed
from outsize.runtime.flow import Walk
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.schedule import Action, Kind

if TYPE_CHECKING:
    from outsize.runtime.spill import Spills
    from outsize.runtime.storage.gradients import Compute, Gradients

Hand = Callable[[Action, Walk], None]


def nothing_comes(action: Action, walk: Walk) -> None:
    """All stages are here."""


class Forward:
    """What goes forward. hand: gives a walk what other workers have sent for an action."""

    kinds = (Kind.FORWARD, Kind.LOSS, Kind.PREFILL, Kind.DECODE)

    def __init__(self, microbatches: Microbatches, hand: Hand = nothing_comes) -> None:
        self._microbatches, self._hand = microbatches, hand

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        return Deed(partial(self._run, action))

    def begin(self, points: Points) -> None:
        self._microbatches.begin(points)

    def reset(self) -> None:
        self._microbatches.reset()

    def _run(self, action: Action) -> None:
        walk = self._microbatches.of(action.microbatch)
        self._hand(action, walk)
        walk.forward(action.stage)
        if action.kind is Kind.LOSS:
            assert walk.loss is not None
            self._microbatches.lose(action.microbatch, walk.loss)


class Backward:
    """What goes back. gradients: where those of weights go. hand: as of Forward."""

    kinds = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)

    def __init__(
        self,
        microbatches: Microbatches,
        gradients: Gradients,
        spills: Spills,
        hand: Hand = nothing_comes,
    ) -> None:
        self._microbatches, self.gradients, self._spills = microbatches, gradients, spills
        self._hand = hand
        self.weight_work: dict[tuple[int, int], list[tuple[Tensor, Compute]]] = {}

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        run = {
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }[action.kind]
        return Deed(partial(run, action))

    def begin(self, points: Points) -> None:
        """What went forward is there."""

    def reset(self) -> None:
        self.weight_work.clear()
        self.gradients.reset()

    def _recompute(self, action: Action) -> None:
        self._microbatches.of(action.microbatch).recompute(action.stage)

    def _backward(self, action: Action) -> None:
        walk = self._microbatches.of(action.microbatch)
        self._hand(action, walk)
        walk.backward(action.stage)
        self._spills.end(action.stage, action.microbatch)

    def _backward_input(self, action: Action) -> None:
        self.gradients.defer()
        self._backward(action)
        self.weight_work[action.stage, action.microbatch] = self.gradients.take()

    def _backward_weight(self, action: Action) -> None:
        for weight, compute in self.weight_work.pop((action.stage, action.microbatch)):
            self.gradients.now(weight, compute)
