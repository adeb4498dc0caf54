"""What the automatic scheduler does to compute orders: split, fill, improve.

Orders stay within a memory cap: a forward holds a unit's share until its weight gradient is done.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from outsize.schedule.action import Action, Kind
from outsize.schedule.pipelines.costs import Costs
from outsize.schedule.pipelines.greedy import makespan
from outsize.schedule.pipelines.pipeline import of_input, of_weight
from outsize.schedule.place import Placement

_Orders = list[list[Action]]
_SLACK = 1e-9
_WORK = 400_000  # actions played while one start is improved: a few seconds at most
_REACH = 8  # places that an action moves at most
_MEMORY = 30  # steps after which a result no worse than then is taken


def split(orders: Sequence[Sequence[Action]]) -> _Orders:
    """Every BACKWARD as its two gradients, one behind the other."""
    return [[part for action in order for part in _parts(action)] for order in orders]


def _parts(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.BACKWARD:
        return (action,)
    pair = (action.stage, action.microbatch)
    return (of_input(*pair), of_weight(*pair))


def filled(place: Placement, orders: _Orders, costs: Costs, held: float, early: int) -> _Orders:
    """The same forwards and input gradients, with the weight gradients in waits.

    early: 0 where a weight gradient must fit into the wait, 1 where it must fill half of itself
    with it, 2 where any wait is enough.
    """
    wait = (1.0, 0.5, 0.0)[early] * costs.of_weight * place.share
    queues = [deque(a for a in order if a.kind is not Kind.BACKWARD_WEIGHT) for order in orders]
    workers = [_Filling(place, costs, held, wait) for _ in orders]
    ends: dict[tuple[bool, int, int], tuple[float, int]] = {}
    moved = True
    while moved:
        moved = False
        for w, (queue, worker) in enumerate(zip(queues, workers, strict=True)):
            while queue:
                action = queue[0]
                ahead = action.kind is Kind.FORWARD
                source = action.stage + (-1 if ahead else 1)
                arrival = 0.0
                if 0 <= source < place.stages:
                    made = ends.get((ahead, source, action.microbatch))
                    if made is None:
                        break
                    arrival = made[0] + (costs.transfer if made[1] != w else 0.0)
                worker.play(queue.popleft(), arrival)
                ends[ahead, action.stage, action.microbatch] = (worker.now, w)
                moved = True
    return [[*worker.order, *worker.pending] for worker in workers]


class _Filling:
    """One worker while waits are filled."""

    def __init__(self, place: Placement, costs: Costs, held: float, wait: float) -> None:
        self.share, self.costs, self.cap, self.wait = place.share, costs, held + _SLACK, wait
        self.now = self.live = 0.0
        self.order: list[Action] = []
        self.pending: deque[Action] = deque()

    def play(self, action: Action, arrival: float) -> None:
        """Weight gradients while there is a wait or no room, then the action."""
        ahead = action.kind is Kind.FORWARD
        while self.pending and (
            (arrival > self.now and arrival - self.now >= self.wait)
            or (ahead and self.live + self.share > self.cap)
        ):
            self.order.append(self.pending.popleft())
            self.now += self.costs.of_weight * self.share
            self.live -= self.share
        seconds = self.costs.forward if ahead else self.costs.of_input
        self.now = max(self.now, arrival) + seconds * self.share
        self.order.append(action)
        if ahead:
            self.live += self.share
        else:
            self.pending.append(of_weight(action.stage, action.microbatch))


def improved(
    place: Placement,
    orders: _Orders,
    costs: Costs,
    held: float,
    factors: Sequence[float] = (),
) -> _Orders:
    """Orders no longer than these: actions move within their worker's order, at random but always
    alike, and what is no worse than the last or than some steps ago is kept. factors: by stage, as
    `makespan` has them."""
    rng = random.Random(0)
    count = sum(map(len, orders))
    now, cost = orders, makespan(place, orders, costs, factors=factors)
    best, least = now, cost
    late = [cost] * _MEMORY
    bound = _bound(place, costs, factors)
    for step in range(_WORK // max(1, count)):
        if least <= bound + _SLACK:
            break
        w = rng.randrange(len(now))
        order = _moved(now[w], rng)
        if order is None or not _fits(order, place.share, held):
            continue
        trial = [*now[:w], order, *now[w + 1 :]]
        new = makespan(place, trial, costs, factors=factors)
        if new <= max(cost, late[step % _MEMORY]):
            now, cost = trial, new
        late[step % _MEMORY] = cost
        if cost < least:
            best, least = now, cost
    return best


def _bound(place: Placement, costs: Costs, factors: Sequence[float]) -> float:
    """No step is shorter: the busiest worker's work, after the first microbatch has come to it."""
    if factors:
        return 0.0
    each = sum(costs.each) * place.share
    work = [0.0] * place.workers
    for m in range(place.microbatches):
        for s in range(place.stages):
            work[place.worker(s, m)] += each
    first = [
        min(route.index(w) for route in place.routes if w in route) for w in range(place.workers)
    ]
    enter = costs.forward * place.share + costs.transfer
    return max(work[w] + first[w] * enter for w in range(place.workers))


def _moved(order: list[Action], rng: random.Random) -> list[Action] | None:
    """One action elsewhere, not past another of its stage and microbatch."""
    i = rng.randrange(len(order))
    j = min(len(order) - 1, max(0, i + rng.choice((-1, 1)) * rng.randint(1, _REACH)))
    action = order[i]
    passed = order[i + 1 : j + 1] if j > i else order[j:i]
    pair = (action.stage, action.microbatch)
    if i == j or any((a.stage, a.microbatch) == pair for a in passed):
        return None
    rest = order[:i] + order[i + 1 :]
    return [*rest[:j], action, *rest[j:]]


def _fits(order: list[Action], share: float, held: float) -> bool:
    live = 0.0
    for action in order:
        if action.kind is Kind.FORWARD:
            live += share
            if live > held + _SLACK:
                return False
        elif action.kind is Kind.BACKWARD_WEIGHT:
            live -= share
    return True
