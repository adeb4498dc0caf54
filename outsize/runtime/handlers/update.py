"""UPDATE: the optimizer's step on a stage or a part of it, on the device or where it rests."""

from __future__ import annotations

from functools import partial

from outsize.errors import OutsizeError
from outsize.runtime.engine import Deed
from outsize.runtime.handlers.norm import Norm, finite
from outsize.runtime.points import Points
from outsize.runtime.storage.gradients import Gradients
from outsize.runtime.storage.update import Updates
from outsize.runtime.totals import Totals
from outsize.schedule import Action, Kind, Lane
from outsize.schedule.action import WHOLE


class Update:
    """lr: the step's learning rate. torn: a step was cut off when some weights had had its update
    and some had not."""

    kinds = (Kind.UPDATE,)

    def __init__(self, updates: Updates, gradients: Gradients, norm: Norm, totals: Totals) -> None:
        self.updates, self._gradients, self._norm = updates, gradients, norm
        self._totals, self.lr = totals, 0.0
        self.torn = self._begun = False

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        if action.lane is not Lane.COMPUTE:
            return Deed(partial(self._at_rest, action))
        outdated = index in points.outdated
        if points.behind and action.part in (WHOLE, 0):
            late = action.stage in points.at_update
            return Deed(partial(self._behind, action, outdated, late))
        return Deed(partial(self._run, action, outdated))

    def begin(self, points: Points) -> None:
        self._begun = False

    def reset(self) -> None:
        self.torn = self.torn or self._begun
        self.updates.reset()

    def check(self) -> None:
        """Refuse a step on weights of which some have moved and some have not."""
        if self.torn:
            raise OutsizeError(
                "job: a step was cut off while it updated the weights; load a checkpoint to go on"
            )

    def _run(self, action: Action, outdated: bool) -> None:
        self._begun = True
        self.updates.run(action, self.lr, self._gradients.touched, outdated)

    def _at_rest(self, action: Action) -> None:
        self._begun = True
        self.updates.at_rest(action, self.lr, self._gradients.touched)

    def _behind(self, action: Action, outdated: bool, late: bool) -> None:
        """Of a stage whose gradient is complete before others are. late: its norm is taken just
        before. Workers agree on each stage; one alone reads all norms together at the end."""
        if late:
            self._norm.square((action.stage,))
        if self._totals.alone:
            self._run(action, outdated)
            return
        chunks = self.updates.weight_pool.placement.chunks.of_stage[action.stage]
        here, touched = self._norm.squares(chunks), self._gradients.touched
        part = self._totals.stage(action.stage, here, touched)
        finite(part**0.5, "some weights may have been updated")
        self._run(action, outdated)
