"""Zero-bubble schedules of one stage a worker: ZB-H1, ZB-H2, and what lies between by memory.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023. The weight gradient waits until a worker has
nothing better to do. The heuristic of the paper's section 3.1, for any times and memory: round by
round one forward and one backward on every worker, weight gradients where a wait is long enough or
memory runs out, over eight settings of its three switches; the shortest wins. ZB-H1 holds what 1F1B
holds on its first worker and is idle for (devices - 1)(F + I - W); ZB-H2 holds twice that and does
not wait between its first and its last action when F = I = W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import ceil

from outsize.errors import OutsizeError
from outsize.schedule.pipelines.conditions import basic
from outsize.schedule.pipelines.costs import EQUAL, Costs
from outsize.schedule.pipelines.pipeline import Pipeline, forward, of_input, of_weight, pipeline
from outsize.schedule.place import looped, one_way

_MAKE = (forward, of_input, of_weight)
_F, _I, _W = range(3)
_HALF = 0.5


def zb_h1(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """As much memory as 1F1B needs on its first worker, on every worker."""
    return zero_bubble("ZB-H1", devices, microbatches, costs, devices)


def zb_h2(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """Twice the memory of ZB-H1."""
    return zero_bubble("ZB-H2", devices, microbatches, costs, 2 * devices)


def zb_2p(devices: int, microbatches: int, costs: Costs = EQUAL) -> Pipeline:
    """ZB-H2 as its authors' code makes it: the cap counts that an input gradient frees half of a
    microbatch. Where it frees less, more than twice ZB-H1 is held, for less waiting inside."""
    return zero_bubble("ZB-2p", devices, microbatches, costs, 2 * devices, _HALF)


def zero_bubble(
    name: str, devices: int, microbatches: int, costs: Costs, held: int, freed: float = 0.0
) -> Pipeline:
    """The shortest that the heuristic finds with at most `held` microbatches on a worker.

    freed: the part of a microbatch's activations that its input gradient already frees.
    """
    basic(name, devices, microbatches)
    if held < 1:
        raise OutsizeError(f"{name}: memory for {held} microbatches; expected at least 1")
    orders = min(_tried(devices, microbatches, costs.whole(), held, freed), key=lambda t: t[0])[1]
    place = one_way(devices, looped(devices, 1), microbatches)
    return pipeline(
        name, place, [[_MAKE[kind](s, m) for kind, m in order] for s, order in enumerate(orders)]
    )


def _tried(
    devices: int, microbatches: int, costs: Costs, held: int, freed: float
) -> Iterator[tuple[float, list[list[tuple[int, int]]]]]:
    """(seconds of the worker that takes longest, each worker's order) for each of the settings."""
    for early, patient, eager in product((True, False), repeat=3):
        workers = [_Worker(freed) for _ in range(devices)]
        _Plan(microbatches, costs, held, early, patient, eager, workers).fill()
        longest = max(worker.now - worker.begin for worker in workers)
        yield longest, [worker.order for worker in workers]


@dataclass
class _Worker:
    """What one worker has done. ends: of its forwards and input gradients, by kind."""

    freed: float
    now: float = 0.0
    idle: float = 0.0  # seconds since its first forward
    begin: float = 0.0
    done: list[int] = field(default_factory=lambda: [0, 0, 0])
    ends: tuple[list[float], ...] = field(default_factory=lambda: ([], [], []))
    order: list[tuple[int, int]] = field(default_factory=list)

    @property
    def held(self) -> float:
        """Microbatches of activations that are live."""
        return self.done[_F] - self.freed * self.done[_I] - (1 - self.freed) * self.done[_W]

    def to_free(self, excess: float) -> int:
        """Weight gradients that free so much, or as many as could be done."""
        each = 1 - self.freed
        return min(self.pending, max(0, ceil(excess / each))) if each else 0

    @property
    def pending(self) -> int:
        """Weight gradients that could be done."""
        return self.done[_I] - self.done[_W]


@dataclass
class _Plan:
    """One run of the heuristic, with its three switches.

    early: no forward of the warm-up ends after the first gradient has arrived. patient: a forward
    may wait where the next worker lags behind. eager: fill every wait with a weight gradient, even
    one that is longer than the wait, where other workers have waited more.
    """

    microbatches: int
    costs: Costs
    limit: int
    early: bool
    patient: bool
    eager: bool
    workers: list[_Worker]

    def fill(self) -> None:
        """Fill the workers' orders: the warm-up, then a round for each further microbatch."""
        self._warm_up()
        for _ in range(1, self.microbatches):
            wanted = self._forwards_wanted()
            for s, worker in enumerate(self.workers):
                if wanted[s]:
                    while worker.held + 1 > self.limit:
                        self._put(_W, s)
                    self._fill(_F, s)
                    self._put(_F, s)
            for s, worker in reversed(list(enumerate(self.workers))):
                self._fill(_I, s)
                while s == 0 and worker.done[_F] == self.microbatches and worker.pending:
                    self._put(_W, s)
                self._put(_I, s)
        for s, worker in enumerate(self.workers):
            while worker.pending:
                self._put(_W, s)

    def _arrival(self, kind: int, s: int) -> float:
        """When the tensor that stage s needs next for this kind is there."""
        source = s - 1 if kind == _F else s + 1
        if kind == _W or not 0 <= source < len(self.workers):
            return 0.0
        at = self.workers[s].done[kind]
        return self.workers[source].ends[kind][at] + self.costs.transfer

    def _put(self, kind: int, s: int) -> None:
        worker = self.workers[s]
        start = max(worker.now, self._arrival(kind, s))
        if worker.done[_F]:
            worker.idle += start - worker.now
        else:
            worker.begin = start
        worker.now = start + self.costs.each[kind]
        worker.ends[kind].append(worker.now)
        worker.order.append((kind, worker.done[kind]))
        worker.done[kind] += 1

    def _fill(self, kind: int, s: int) -> None:
        """Weight gradients while stage s waits for what it needs next."""
        worker, arrival = self.workers[s], self._arrival(kind, s)
        while worker.pending and worker.now + self.costs.of_weight <= arrival:
            self._put(_W, s)
        if worker.pending and worker.now < arrival:
            most = max(other.idle for other in self.workers)
            if self.eager or arrival - worker.now > most - worker.idle:
                self._put(_W, s)

    def _warm_up(self) -> None:
        """The first forward everywhere, further ones until the first gradient comes, and that."""
        for s in range(len(self.workers)):
            self._put(_F, s)
        for s, count in enumerate(self._extra()):
            for _ in range(count):
                self._put(_F, s)
        for s in reversed(range(len(self.workers))):
            self._put(_I, s)

    def _extra(self) -> list[int]:
        """Forwards of each worker between its first and its first gradient.

        Fewer on each next worker, unless they are all that there are.
        """
        last = len(self.workers) - 1
        extra = [0] * (last + 1)
        back = self.workers[last].now + self.costs.of_input  # when the gradient leaves a stage
        for s in reversed(range(last)):
            now, arrival = self.workers[s].now, back + self.costs.transfer
            while extra[s] + 1 < min(self.microbatches, self.limit):
                if now + self.costs.forward > arrival if self.early else now >= arrival:
                    break
                now += self.costs.forward
                extra[s] += 1
            back = max(now, arrival) + self.costs.of_input
        for s in range(1, last + 1):
            while extra[s - 1] <= extra[s] < self.microbatches - 1 and extra[s]:
                extra[s] -= 1
        return extra

    def _forwards_wanted(self) -> list[bool]:
        """Whether each worker does a forward in this round; none does where the next does not."""
        wanted = [self._wants_forward(s) for s in range(len(self.workers))]
        for s in reversed(range(len(wanted) - 1)):
            wanted[s] = wanted[s] and wanted[s + 1]
        return wanted

    def _wants_forward(self, s: int) -> bool:
        worker = self.workers[s]
        if worker.done[_F] >= self.microbatches:
            return False
        if not self.patient or s + 1 == len(self.workers):
            return True
        behind, costs = self.workers[s + 1], self.costs
        if worker.done[_F] < behind.done[_F] + 2:
            return True
        free = behind.now + costs.forward + costs.of_input + costs.transfer
        if worker.now >= free:
            return False
        room = worker.to_free(worker.held + 1 - self.limit) * costs.of_weight
        if worker.now + costs.forward + room <= free:
            return True
        most = max(other.idle for other in self.workers)
        return free - worker.now > most - worker.idle
