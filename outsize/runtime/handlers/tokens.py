"""PREFILL and DECODE: tokens of requests through the stages of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from outsize.models.seams import Context
from outsize.runtime.engine import Deed
from outsize.runtime.points import Points
from outsize.schedule import Action, Kind

Stage = Callable[[int, Tensor, Context, bool], Tensor]  # what a stage makes of what is carried


class Tokens:
    """stage: runs one; its last argument says whether the end of each sequence is all that is
    asked for."""

    kinds = (Kind.PREFILL, Kind.DECODE)

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._carry: Tensor | None = None

    def ready(self, ids_T: Tensor, context: Context, last: bool = True) -> None:
        """Set out on tokens."""
        self._carry, self._context, self._last = ids_T, context, last

    def taken(self) -> Tensor:
        """What the last stage gave."""
        carry, self._carry = self._carry, None
        assert carry is not None
        return carry

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        return Deed(partial(self._run, action.stage))

    def begin(self, points: Points) -> None:
        """The tokens are there."""

    def reset(self) -> None:
        self._carry = None

    def _run(self, stage: int) -> None:
        self._carry = self._stage(stage, self.taken(), self._context, self._last)
