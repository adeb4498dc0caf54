"""FORWARD, RECOMPUTE and BACKWARD, PREFILL and DECODE: the model's stages on one microbatch."""

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
from outsize.schedule.action import AHEAD

if TYPE_CHECKING:
    from outsize.runtime.handlers.spill import Spilling
    from outsize.runtime.storage.gradients import Compute, Gradients

Hand = Callable[[Action, Walk], None]


def nothing_comes(action: Action, walk: Walk) -> None:
    """All stages are here."""


class Forward:
    """What goes forward, where nothing goes back. hand: as of Passes."""

    kinds = AHEAD

    def __init__(self, microbatches: Microbatches, stages: int, hand: Hand = nothing_comes) -> None:
        self._microbatches, self._last, self._hand = microbatches, stages - 1, hand

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
        if action.stage == self._last and action.kind is Kind.FORWARD:
            assert walk.loss is not None
            self._microbatches.lose(action.microbatch, walk.loss)


class Passes:
    """gradients: where those of weights go. hand: gives a walk what other workers have sent for an
    action. stages: of the whole model."""

    kinds = (
        *AHEAD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT,
    )  # fmt: skip

    def __init__(
        self,
        microbatches: Microbatches,
        gradients: Gradients,
        spilling: Spilling,
        stages: int,
        hand: Hand = nothing_comes,
    ) -> None:
        self.microbatches, self.gradients, self._spilling = microbatches, gradients, spilling
        self._last, self._hand = stages - 1, hand
        self.weight_work: dict[tuple[int, int], list[tuple[Tensor, Compute]]] = {}

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        run = {
            Kind.FORWARD: self._forward,
            Kind.PREFILL: self._tokens,
            Kind.DECODE: self._tokens,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }[action.kind]
        return Deed(partial(run, action))

    def begin(self, points: Points) -> None:
        self.microbatches.begin(points)

    def reset(self) -> None:
        self.microbatches.reset()
        self.weight_work.clear()
        self.gradients.reset()

    def _forward(self, action: Action) -> None:
        walk = self.microbatches.of(action.microbatch)
        self._hand(action, walk)
        self._spilling.of(action.microbatch, action.stage)  # of a stage without blocks it is empty
        walk.forward(action.stage)
        if action.stage == self._last and walk.loss is not None:
            self.microbatches.lose(action.microbatch, walk.loss.detach())

    def _tokens(self, action: Action) -> None:
        walk = self.microbatches.of(action.microbatch)
        self._hand(action, walk)
        walk.forward(action.stage)

    def _recompute(self, action: Action) -> None:
        self.microbatches.of(action.microbatch).recompute(action.stage)

    def _backward(self, action: Action) -> None:
        walk = self.microbatches.of(action.microbatch)
        self._hand(action, walk)
        walk.backward(action.stage)
        self._spilling.spills.end(action.stage, action.microbatch)

    def _backward_input(self, action: Action) -> None:
        self.gradients.defer()
        self._backward(action)
        self.weight_work[action.stage, action.microbatch] = self.gradients.take()

    def _backward_weight(self, action: Action) -> None:
        for weight, compute in self.weight_work.pop((action.stage, action.microbatch)):
            self.gradients.now(weight, compute)
