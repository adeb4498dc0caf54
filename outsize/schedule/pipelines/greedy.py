"""Greedy orders: on whatever placement, each free worker does the best of what is ready.

A backward goes before a forward, and the microbatch that entered earlier goes first. What a worker
holds is bounded, and so may be how many microbatches are under way at once. The bidirectional and
wave schedules are this rule on their placements. The early rule has it the other way round: a
forward goes first while there is room, so that no worker lacks a backward later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from outsize.schedule.action import Action, Kind
from outsize.schedule.pipelines.costs import Costs
from outsize.schedule.pipelines.pipeline import Paths, backward, forward, plain_paths
from outsize.schedule.place import Placement
from outsize.schedule.role import neighbours

_Ready = tuple[int, int, int, int]  # forward or not, rank on its route, microbatch, stage


@dataclass
class _Worker:
    held: float = 0.0
    busy: bool = False
    backs: list[_Ready] = field(default_factory=list)
    forwards: list[_Ready] = field(default_factory=list)
    order: list[Action] = field(default_factory=list)


_SLACK = 1e-9  # sums of shares such as 1 / 3
_EVEN = Costs(2.0, 1.0, 1.0)  # a backward as long as a forward: the orders that papers draw


def best_greedy(
    place: Placement,
    costs: Costs,
    held: int,
    paths: Paths = (),
    also: Sequence[list[list[Action]]] = (),
) -> list[list[Action]]:
    """The shortest orders of several runs of the rule, with at most `held` units on a worker.

    paths: the stages of each microbatch, where not all in order. also: orders from elsewhere, taken
    where they are shorter.

    The rule runs for the costs and for backwards as long as forwards, with any number of
    microbatches under way, and with few: what helps now may hinder later. Ties go to the first.
    """
    ticks, most = costs.whole(), place.microbatches
    allowed = sorted({most, *range(held, min(most, 2 * held))}, reverse=True)
    tries = []
    for rule in dict.fromkeys((ticks, _EVEN)):
        reached = most + 1
        for under_way in allowed:
            if under_way >= reached:
                continue  # the run before has not come to so many: it would be the same
            play = _Play(place, rule, held, under_way, paths)
            orders, reached = play.go(), play.reached
            if orders is not None:
                tries.append(orders)
    return min((*tries, *also), key=lambda orders: makespan(place, orders, ticks, paths))


def greedy(
    place: Placement, costs: Costs, held: int, under_way: int, early: bool = False
) -> list[list[Action]] | None:
    """The rule's orders, with at most `under_way` microbatches in the pipeline at once. early: of
    the rule that has forwards first.

    None where every worker is full and none has a backward to do, which cannot be when no more are
    under way than may be held.
    """
    return _Play(place, costs, held, under_way, (), early).go()


def makespan(
    place: Placement,
    orders: list[list[Action]],
    costs: Costs,
    paths: Paths = (),
    factors: Sequence[float] = (),
) -> float:
    """When the last worker ends, if each plays its order as soon as inputs allow.

    factors: by stage, how many times as long as a unit's share it takes. Infinite where the orders
    wait for each other.
    """
    around = [neighbours(path) for path in paths or plain_paths(place)]
    seconds = {
        Kind.FORWARD: costs.forward,
        Kind.BACKWARD: costs.of_input + costs.of_weight,
        Kind.BACKWARD_INPUT: costs.of_input,
        Kind.BACKWARD_WEIGHT: costs.of_weight,
    }
    ends: dict[tuple[bool, int, int], tuple[float, int]] = {}
    at, now = [0] * len(orders), [0.0] * len(orders)
    todo = list(range(len(orders)))
    waiting: dict[tuple[bool, int, int], int] = {}
    while todo:
        w = todo.pop()
        while at[w] < len(orders[w]):
            action = orders[w][at[w]]
            ahead = action.kind is Kind.FORWARD
            source = around[action.microbatch][not ahead].get(action.stage)
            start = now[w]
            if action.kind is not Kind.BACKWARD_WEIGHT and source is not None:
                needed = (ahead, source, action.microbatch)
                if needed not in ends:
                    waiting[needed] = w
                    break
                end, where = ends[needed]
                start = max(start, end + (costs.transfer if where != w else 0.0))
            longer = factors[action.stage] if factors else 1.0
            now[w] = start + seconds[action.kind] * place.share * longer
            at[w] += 1
            if action.kind is not Kind.BACKWARD_WEIGHT:
                made = (ahead, action.stage, action.microbatch)
                ends[made] = (now[w], w)
                if made in waiting:
                    todo.append(waiting.pop(made))
    ended = all(i == len(order) for i, order in zip(at, orders, strict=True))
    return max(now) if ended else float("inf")


class _Play:
    """The state of one run."""

    def __init__(
        self,
        place: Placement,
        costs: Costs,
        held: int,
        under_way: int,
        paths: Paths,
        early: bool = False,
    ) -> None:
        self.paths, self.early = paths or plain_paths(place), early
        self.around = [neighbours(path) for path in self.paths]
        self.place, self.held, self.under_way = place, held + _SLACK, under_way
        self.forward = costs.forward * place.share
        self.backward = (costs.of_input + costs.of_weight) * place.share
        self.transfer = costs.transfer
        self.workers = [_Worker() for _ in range(place.workers)]
        self.events: list[tuple[float, int, int, _Ready]] = []  # when, worker, whether an end, what
        self.inside, self.left = 0, 2 * sum(map(len, self.paths))
        self.reached = 0  # microbatches that were under way at once, at most
        first: dict[int, int] = {}
        self.rank = []
        for route in place.route:
            self.rank.append(first.get(route, 0))
            first[route] = self.rank[-1] + 1

    def go(self) -> list[list[Action]] | None:
        """Play to the end."""
        now = 0.0
        for m in range(self.place.microbatches):
            self._arrive(0.0, True, self.paths[m][0], m)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                self._happen(now)
            for worker in self.workers:
                self._start(now, worker)
        if self.left:
            return None
        return [worker.order for worker in self.workers]

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
            self.inside -= stage == self.paths[m][0]
        to = self.around[m][ahead].get(stage)
        if to is None and ahead:
            self._arrive(now, False, stage, m)
        elif to is not None:
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
            self.inside += stage == self.paths[m][0]
            self.reached = max(self.reached, self.inside)
        end = now + (self.forward if ahead else self.backward)
        heappush(self.events, (end, self.place.worker(stage, m), 1, what))

    def _best(self, worker: _Worker) -> _Ready | None:
        ahead = self._ahead(worker) if self.early or not worker.backs else None
        return heappop(worker.backs) if ahead is None and worker.backs else ahead

    def _ahead(self, worker: _Worker) -> _Ready | None:
        """The best forward, where there is room for one."""
        if not worker.forwards or worker.held + self.place.share > self.held:
            return None
        if self.inside < self.under_way:
            return heappop(worker.forwards)
        entered = [what for what in worker.forwards if what[3] != self.paths[what[2]][0]]
        if not entered:
            return None
        best = min(entered)
        worker.forwards.remove(best)
        heapify(worker.forwards)
        return best
