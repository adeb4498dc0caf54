"""SEND and RECV: activations and their gradients to and from workers that have other stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outsize.runtime.engine import Deed
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.schedule import Action, Kind

if TYPE_CHECKING:
    from outsize.runtime.stage_links import StageLinks


class Links:
    """Of one worker of a pipeline."""

    kinds = (Kind.SEND, Kind.RECV)

    def __init__(self, passing: StageLinks, microbatches: Microbatches) -> None:
        self.passing, self._microbatches = passing, microbatches

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        passing, of, m = self.passing, self._microbatches, action.microbatch
        return Deed(
            lambda: passing.move(action, of.shapes(m)),
            lambda: passing.prepare(action, of.of, of.shapes(m)),
        )

    def begin(self, points: Points) -> None:
        self.passing.evaluating = points.forward

    def reset(self) -> None:
        self.passing.reset()

    def sweep(self, index: int, points: Points) -> Callable[[], None]:
        """Before an action: what has gone is let go."""
        return self.passing.sweep
