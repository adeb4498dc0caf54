"""Greedy orders: on whatever placement, each free worker does the best of what is ready.

A backward goes before a forward, and the microbatch that entered earlier goes first. What a worker
holds is bounded, and so may be how many microbatches are under way at once. The bidirectional and
wave schedules are this rule on their placements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from outsize.schedule.action import Action
from outsize.schedule.pipelines.costs import Costs
from outsize.schedule.pipelines.pipeline import backward, forward
from outsize.schedule.place import Placement

_Ready = tuple[int, int, int, int]  # forward or not, rank on its route, microbatch, stage


@dataclass
class _Worker:
    held: float = 0.0
    peak: float = 0.0
    busy: bool = False
    backs: list[_Ready] = field(default_factory=list)
    forwards: list[_Ready] = field(default_factory=list)
    order: list[Action] = field(default_factory=list)


@dataclass(frozen=True)
class Greedy:
    """What the rule gives. makespan: in ticks of its costs. peak: units held on one worker."""

    makespan: float
    peak: float
    orders: list[list[Action]]


def greedy(place: Placement, costs: Costs, held: float, under_way: int) -> Greedy | None:
    """Orders with at most `held` units on a worker and `under_way` microbatches in the pipeline.

    costs: of one unit. Gives None where the bounds let the step not end.
    """
    return _Play(place, costs.whole(), held, under_way).go()


class _Play:
    """The state of one run."""

    def __init__(self, place: Placement, costs: Costs, held: float, under_way: int) -> None:
        self.place, self.held, self.under_way = place, held + 1e-9, under_way
        self.forward = costs.forward * place.share
        self.backward = (costs.of_input + costs.of_weight) * place.share
        self.transfer = costs.transfer
        self.workers = [_Worker() for _ in range(place.workers)]
        self.events: list[tuple[float, int, int, _Ready]] = []  # when, worker, whether an end, what
        self.inside, self.left = 0, 2 * place.stages * place.microbatches
        first: dict[int, int] = {}
        self.rank = []
        for route in place.route:
            self.rank.append(first.get(route, 0))
            first[route] = self.rank[-1] + 1

    def go(self) -> Greedy | None:
        """Play to the end."""
        now = 0.0
        for m in range(self.place.microbatches):
            self._arrive(0.0, True, 0, m)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                self._happen(now)
            for worker in self.workers:
                self._start(now, worker)
        if self.left:
            return None
        peak = max(worker.peak for worker in self.workers)
        return Greedy(now, peak, [worker.order for worker in self.workers])

    def _arrive(self, when: float, ahead: bool, stage: int, m: int) -> None:
        worker = self.place.worker(stage, m)
        heappush(self.events, (when, worker, 0, (int(ahead), self.rank[m], m, stage)))

    def _happen(self, now: float) -> None:
        """Something has arrived or ended."""
        _, w, ended, what = heappop(self.events)
        worker = self.workers[w]
        if not ended:
            heappush(worker.forwards if what[0] else worker.backs, what)
            return
        worker.busy, self.left = False, self.left - 1
        ahead, _, m, stage = what
        if not ahead:
            worker.held -= self.place.share
            self.inside -= stage == 0
        last = self.place.stages - 1
        to = stage + (1 if ahead else -1)
        if ahead and stage == last:
            self._arrive(now, False, last, m)
        elif to >= 0:
            moves = self.place.worker(to, m) != w
            self._arrive(now + (self.transfer if moves else 0.0), bool(ahead), to, m)

    def _start(self, now: float, worker: _Worker) -> None:
        """Begin the best of what is ready, if there is anything and the worker is free."""
        what = None if worker.busy else self._best(worker)
        if what is None:
            return
        ahead, _, m, stage = what
        worker.busy = True
        worker.order.append(forward(stage, m) if ahead else backward(stage, m))
        if ahead:
            worker.held += self.place.share
            worker.peak = max(worker.peak, worker.held)
            self.inside += stage == 0
        end = now + (self.forward if ahead else self.backward)
        heappush(self.events, (end, self.place.worker(stage, m), 1, what))

    def _best(self, worker: _Worker) -> _Ready | None:
        if worker.backs:
            return heappop(worker.backs)
        if not worker.forwards or worker.held + self.place.share > self.held:
            return None
        if self.inside < self.under_way:
            return heappop(worker.forwards)
        entered = [what for what in worker.forwards if what[3]]
        if not entered:
            return None
        best = min(entered)
        worker.forwards.remove(best)
        heapify(worker.forwards)
        return best
