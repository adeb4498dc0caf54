"""ZB-V: two stages a worker in a V, zero bubble with the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6. Down the workers, up again, and the
same way back, so that the worker of the first stage has the last one too: its gradients return
early. Every worker holds at most `devices` microbatches, and none waits between its first and its
last action when F = I = W. The heuristic puts forwards and gradients in rounds, fills waits with
weight gradients, and runs again with what each worker waited at last as its allowance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from outsize.schedule.pipelines.conditions import at_least, basic
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.pipeline import Pipeline, pipeline
from outsize.schedule.pipelines.vee import orders_of
from outsize.schedule.place import one_way, waved

_F, _I, _W = range(3)
_Order = list[tuple[int, int, int]]  # kind, pass down or up, microbatch


def zb_v(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """Two stages a worker, with at most `devices` microbatches of both held."""
    basic("ZB-V", devices, microbatches)
    at_least("ZB-V", "microbatches", microbatches, devices)
    tries = [
        best
        for back, ahead in product((True, False), repeat=2)
        for best in _tries(devices, microbatches, costs.whole(), back, ahead)
    ]
    orders = min(tries, key=lambda tried: tried[0])[1]
    place = one_way(devices, waved(devices, 2), microbatches)
    return pipeline("ZB-V", place, orders_of(orders))


def _tries(
    devices: int, microbatches: int, costs: Costs, back: bool, ahead: bool
) -> Iterator[tuple[float, list[_Order]]]:
    """(the longest wait, the orders) of runs that each take the waits of the last as allowed."""
    allowed = [-1.0] * devices
    while True:
        plan = _Plan(microbatches, costs, back, ahead, allowed)
        plan.fill()
        waits = [worker.idle for worker in plan.workers]
        yield max(waits), [worker.order for worker in plan.workers]
        if 0 <= max(allowed) <= max(waits):
            return
        allowed = waits


@dataclass
class _Worker:
    """What one worker has done. ends[kind][pass]: of its forwards and input gradients."""

    now: float = 0.0
    idle: float = 0.0  # since its first forward
    held: int = 0
    ends: tuple[tuple[list[float], list[float]], ...] = field(
        default_factory=lambda: (([], []), ([], []))
    )
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    order: _Order = field(default_factory=list)

    def done(self, kind: int, way: int) -> int:
        """How many of a kind, on the pass down (0) or up (1)."""
        return len(self.ends[kind][way])


@dataclass
class _Plan:
    """One run. back, ahead: whether long waits of the gradients going up, and of the forwards, are
    begun with a weight gradient too. allowed: what each worker waited in the run before."""

    microbatches: int
    costs: Costs
    back: bool
    ahead: bool
    allowed: list[float]
    workers: list[_Worker] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = [_Worker() for _ in self.allowed]

    def fill(self) -> None:
        """Write every worker's order: the warm-up, then rounds of a gradient and a forward."""
        self._down_and_up()
        self._level()
        for _ in range(2 * self.microbatches):
            ways = [self._gradient_way(w) for w in range(len(self.workers))]
            for w in (*(w for w in self._upwards() if ways[w]), *self._downwards(ways)):
                self._fill(_I, ways[w], w, greedy=bool(ways[w]) or self.back)
                self._put(_I, ways[w], w)
            for w in range(len(self.workers)):
                self._one_forward(w)
        for w, worker in enumerate(self.workers):
            while worker.weights:
                self._weight(w)

    def _upwards(self) -> Iterator[int]:
        return reversed(range(len(self.workers)))

    def _downwards(self, ways: list[int]) -> Iterator[int]:
        return (w for w in range(len(self.workers)) if not ways[w])

    def _arrival(self, kind: int, way: int, w: int) -> float | None:
        """When the tensor that a worker needs next on a pass is there; None before it is made."""
        source = w + 1 if way else w - 1
        if not 0 <= source < len(self.workers):
            return 0.0
        at, ends = self.workers[w].done(kind, way), self.workers[source].ends[kind][way]
        return ends[at] + self.costs.transfer if at < len(ends) else None

    def _put(self, kind: int, way: int, w: int) -> None:
        worker, arrival = self.workers[w], self._arrival(kind, way, w)
        assert arrival is not None, "rounds keep the order of the V"
        start = max(worker.now, arrival)
        worker.idle += start - worker.now if worker.order else 0.0
        worker.now = start + self.costs.each[kind]
        microbatch = worker.done(kind, way)
        worker.ends[kind][way].append(worker.now)
        worker.order.append((kind, way, microbatch))
        if kind == _F:
            worker.held += 1
        else:
            worker.weights.append((way, microbatch))

    def _weight(self, w: int) -> None:
        worker = self.workers[w]
        worker.order.append((_W, *worker.weights.popleft()))
        worker.now += self.costs.of_weight
        worker.held -= 1

    def _fill(self, kind: int, way: int, w: int, greedy: bool) -> None:
        """Weight gradients while a worker waits; one more where it waits too long."""
        worker, arrival = self.workers[w], self._arrival(kind, way, w) or 0.0
        while worker.weights and worker.now + self.costs.of_weight <= arrival:
            self._weight(w)
        most = max(other.idle for other in self.workers)
        most = max(most, max(self.allowed) - self.allowed[w])
        if greedy and worker.weights and arrival - worker.now > most - worker.idle:
            self._weight(w)

    def _down_and_up(self) -> None:
        """The first microbatch through the V, and further ones on the way down while it is away."""
        count, limit = len(self.workers), 2 * len(self.workers)
        for w in range(count):
            self._put(_F, 0, w)
        for w in self._upwards():
            worker, arrival = self.workers[w], self._arrival(_F, 1, w)
            assert arrival is not None
            while (
                worker.held + 2 + 2 * w <= limit
                and worker.now + self.costs.forward <= arrival
                and self.workers[0].done(_F, 0) < self.microbatches
            ):
                for j in range(w + 1):
                    self._put(_F, 0, j)
            self._put(_F, 1, w)

    def _level(self) -> None:
        """Forwards, down and up in turn, until each worker has as many as the one above it."""
        way = 0
        for w in range(1, len(self.workers)):
            while self._behind(w):
                for j in reversed(range(w, len(self.workers))):
                    if self.workers[j].done(_F, way) < self.microbatches:
                        self._put(_F, way, j)
                way = 1 - way

    def _behind(self, w: int) -> bool:
        down, up = (self.workers[w].done(_F, way) for way in (0, 1))
        down_above, up_above = (self.workers[w - 1].done(_F, way) for way in (0, 1))
        return down + up < down_above + up_above or up <= up_above < self.microbatches

    def _gradient_way(self, w: int) -> int:
        """Which pass a worker's next gradient is of."""
        worker = self.workers[w]
        if worker.done(_I, 1) >= worker.done(_I, 0):
            return 0
        there = self._arrival(_I, 1, w) is not None
        return int(there or worker.done(_I, 0) >= self.microbatches)

    def _one_forward(self, w: int) -> None:
        worker = self.workers[w]
        down, up = worker.done(_F, 0), worker.done(_F, 1)
        if up >= self.microbatches:
            return
        way = int(down > up and self._arrival(_F, 1, w) is not None)
        if way == 0 and (down >= self.microbatches or self._arrival(_F, 0, w) is None):
            return
        while worker.held >= 2 * len(self.workers):
            self._weight(w)
        self._fill(_F, way, w, greedy=self.ahead)
        self._put(_F, way, w)
