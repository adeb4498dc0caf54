"""Evaluation: forward passes alone, with what streams beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from outsize.runtime.flow import Flow, Way
from outsize.runtime.lanes import Lanes
from outsize.runtime.passing import Passing, shapes_of
from outsize.runtime.residence import Residence, transfer
from outsize.schedule import Action, Kind, Schedule, State
from outsize.schedule.vocabulary import PASSES
from outsize.trace.trace import Event


def start_of(schedule: Schedule) -> frozenset[str]:
    """What a schedule expects to find in the pool."""
    return frozenset() if schedule.residency is None else schedule.residency.start


class Evaluation:
    """Plays evaluations of a model over a residence; a schedule is made once for each number of
    microbatches."""

    def __init__(self, residence: Residence, flow: Flow, passing: Passing | None = None) -> None:
        self.residence, self.flow, self._passing = residence, flow, passing
        self._known: dict[int, tuple[frozenset[str], Lanes]] = {}

    def losses(self, parts: Sequence[Any]) -> float:
        """The sum of the losses of microbatches."""
        count = len(parts)
        if count not in self._known:
            schedule = self.residence.placement.evaluation(count)
            self._known[count] = (start_of(schedule), Lanes(schedule, self.residence.device))
        start, lanes = self._known[count]
        try:
            self.residence.ensure(start)
            reader = Reader(self.residence, self.flow, parts, self._passing)
            if self._passing is not None:
                self._passing.evaluating = True
            lanes.play(reader, time.perf_counter())
        except BaseException:
            self.residence.forget()
            raise
        finally:
            if self.flow.rows is not None:
                self.flow.rows.reset()
            if self._passing is not None:
                self._passing.evaluating = False
                self._passing.reset()
        return sum(reader.losses)


class Reader:
    """Plays an evaluation: every microbatch forward, what streams beside it. passing: to and from
    the workers that have other stages."""

    def __init__(
        self,
        residence: Residence,
        flow: Flow,
        parts: Sequence[Any],
        passing: Passing | None = None,
    ) -> None:
        self.residence, self.flow, self._passing = residence, flow, passing
        held = None if passing is None else _held(passing)
        last = len(residence.placement.plan.stages) - 1
        self.walks = [
            flow.begin(part, 1.0, held=held, way=Way(m, 0, last)) for m, part in enumerate(parts)
        ]
        self.losses = [0.0] * len(parts)
        self._shapes = [shapes_of(part) for part in parts] if passing else []

    def act(self, index: int, action: Action, begin: float) -> Event:
        """FORWARD of a stage, or what this worker does of a cut vocabulary."""
        walk, rows = self.walks[action.microbatch], self.flow.rows
        if rows is not None and action.kind in PASSES:
            (rows.embed if action.kind is Kind.EMBED else rows.score)(action.microbatch)
            return _nothing(action)
        if self._passing is not None:
            self._passing.hand(action, walk)
        walk.forward(action.stage)
        if walk.loss is not None:
            self.losses[action.microbatch] = float(walk.loss)
        return _nothing(action)

    def prepare(self, index: int, action: Action) -> None:
        """Rooms are there; what other workers need leaves."""
        if action.kind is Kind.EXCHANGE:
            assert self.flow.rows is not None
            self.flow.rows.announce(action.state, action.microbatch)
        if action.kind not in (Kind.SEND, Kind.RECV):
            return
        assert self._passing is not None
        m = action.microbatch
        self._passing.prepare(action, self.walks[m], self._shapes[m])

    def settle(self, index: int, action: Action) -> None:
        """Nothing is let go."""

    def move(self, index: int, action: Action, begin: float) -> Event:
        """Parameters come, or what other workers give."""
        if action.kind in (Kind.SEND, Kind.RECV):
            assert self._passing is not None
            self._passing.move(action, self._shapes[action.microbatch])
        elif action.kind is Kind.EXCHANGE:
            assert self.flow.rows is not None
            self.flow.rows.exchange(action.state, action.microbatch)
            if action.state is State.SUMS and not self.residence.placement.turn:
                self.losses[action.microbatch] = float(self.flow.rows.loss(action.microbatch))
        else:
            transfer(self.residence, action, False)
        return _nothing(action)


def _held(passing: Passing) -> frozenset[int]:
    """The stages that this worker has in an evaluation."""
    return passing.line.route(passing.turn)


def _nothing(action: Action) -> Event:
    """An event that nobody looks at."""
    return Event(
        0, action.lane.value, action.label, action.stage, action.microbatch, 0.0, 0.0, {}, 0
    )
