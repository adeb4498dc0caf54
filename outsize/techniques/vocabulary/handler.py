"""EMBED, OUTPUT and EXCHANGE: a vocabulary that is cut over the workers of a pipeline."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from outsize.runtime.engine import Deed
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.schedule import Action, Kind, State
from outsize.techniques.vocabulary.ends import EMBED, EMBED_BACKWARD, OUTPUT_S, OUTPUT_T

if TYPE_CHECKING:
    from outsize.techniques.vocabulary.rows import Rows


class Vocabulary:
    """rows: those that are here. counts: this worker books the losses, which all have."""

    kinds = (EMBED, EMBED_BACKWARD, OUTPUT_S, OUTPUT_T, Kind.EXCHANGE)

    def __init__(self, rows: Rows, microbatches: Microbatches, counts: bool) -> None:
        self.rows, self._microbatches, self._counts = rows, microbatches, counts

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        rows, m = self.rows, action.microbatch
        if action.kind is Kind.EXCHANGE:
            run = partial(self._exchange, action, points.evaluates)
            return Deed(run, partial(rows.announce, action.state, m))
        passes = {
            EMBED: self._embed, EMBED_BACKWARD: rows.embed_backward,
            OUTPUT_S: rows.score, OUTPUT_T: self._settle,
        }  # fmt: skip
        return Deed(partial(passes[action.kind], m))

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
