"""EMBED, OUTPUT and EXCHANGE: a vocabulary that is cut over the workers of a pipeline."""

from __future__ import annotations

from functools import partial

from outsize.runtime.engine import Deed
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.runtime.vocabulary import Rows
from outsize.schedule import Action, Kind, State


class Vocabulary:
    """rows: those that are here. counts: this worker books the losses, which all have."""

    kinds = (Kind.EMBED, Kind.EMBED_BACKWARD, Kind.OUTPUT_S, Kind.OUTPUT_T, Kind.EXCHANGE)

    def __init__(self, rows: Rows, microbatches: Microbatches, counts: bool) -> None:
        self.rows, self._microbatches, self._counts = rows, microbatches, counts

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        rows, m = self.rows, action.microbatch
        match action.kind:
            case Kind.EMBED:
                return Deed(partial(self._embed, m))
            case Kind.EMBED_BACKWARD:
                return Deed(partial(rows.embed_backward, m))
            case Kind.OUTPUT_S:
                return Deed(partial(rows.score, m))
            case Kind.OUTPUT_T:
                return Deed(partial(self._settle, m))
            case _:
                run = partial(self._exchange, action, points.evaluates)
                return Deed(run, partial(rows.announce, action.state, m))

    def begin(self, points: Points) -> None:
        """Nothing is there."""

    def reset(self) -> None:
        self.rows.reset()

    def _embed(self, m: int) -> None:
        self._microbatches.of(m)
        self.rows.embed(m)

    def _settle(self, m: int) -> None:
        """The rest of the head."""
        loss = self.rows.settle(m)
        if self._counts:
            self._microbatches.lose(m, loss)

    def _exchange(self, action: Action, evaluates: bool) -> None:
        m = action.microbatch
        self.rows.exchange(action.state, m)
        if evaluates and self._counts and action.state is State.SUMS:
            loss = self.rows.loss(m)
            if loss is not None:
                self._microbatches.lose(m, loss)
