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

    def __init__(self, stage_links: StageLinks, microbatches: Microbatches) -> None:
        self.stage_links, self._microbatches = stage_links, microbatches

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        stage_links, of, m = self.stage_links, self._microbatches, action.microbatch
        return Deed(
            lambda: stage_links.move(action, of.shapes(m)),
            lambda: stage_links.prepare(action, of.of, of.shapes(m)),
        )

    def begin(self, points: Points) -> None:
        self.stage_links.evaluating = points.forward

    def reset(self) -> None:
        self.stage_links.reset()

    def sweep(self, index: int, points: Points) -> Callable[[], None]:
        """Before an action: what has gone is let go."""
        return self.stage_links.sweep
