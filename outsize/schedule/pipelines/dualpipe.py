"""DualPipe and DualPipeV: two streams, a forward of one with a backward of the other.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and the deepseek-ai/DualPipe repository (V: Qi et
al., "DualPipe could be better without the Dual", 2025). DualPipe holds every stage twice and sends
microbatches from both ends; DualPipeV folds the pipeline, so that each worker holds two stages. A
worker is idle for (stages / 2 - 1)(FB + B - 3W), FB being a forward and a backward run as one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outsize.schedule.action import Action
from outsize.schedule.pipelines.conditions import at_least, even
from outsize.schedule.pipelines.pipeline import (
    Pair,
    Pipeline,
    backward,
    forward,
    of_input,
    of_weight,
    pipeline,
)
from outsize.schedule.place import Placement, looped, two_way, waved


def dualpipe(devices: int, microbatches: int) -> Pipeline:
    """Half of the microbatches from each end. Two stages a worker, each of them held twice."""
    even("DualPipe", "devices", devices)
    even("DualPipe", "microbatches", microbatches)
    at_least("DualPipe", "devices", devices, 2)
    at_least("DualPipe", "microbatches", microbatches, 2 * devices)
    place = two_way(devices, looped(devices, 1), microbatches)
    each, half = microbatches // 2, devices // 2
    workers = []
    for worker in range(devices):
        depth = min(worker, devices - 1 - worker)
        here = (depth, devices - 1 - depth)  # the stage in the near stream and in the far one
        first = (0, each) if worker < half else (each, 0)
        workers.append(_Worker(here, first).play(half, depth, each))
    return _joined("DualPipe", place, workers)


def dualpipe_v(devices: int, microbatches: int) -> Pipeline:
    """Every microbatch down the workers and up again. Two stages a worker, each of one unit."""
    at_least("DualPipeV", "devices", devices, 1)
    at_least("DualPipeV", "microbatches", microbatches, 2 * devices)
    place = Placement(devices, (waved(devices, 2),), (0,) * microbatches)
    workers = [
        _Worker((w, 2 * devices - 1 - w), (0, 0)).play(devices, w, microbatches)
        for w in range(devices)
    ]
    return _joined("DualPipeV", place, workers)


def _joined(name: str, place: Placement, workers: list[_Worker]) -> Pipeline:
    together = frozenset(pair for worker in workers for pair in worker.together)
    return pipeline(name, place, [worker.order for worker in workers], together)


@dataclass
class _Worker:
    """What one worker does. Stream 0 is the one that enters on its side, stream 1 comes back.

    stages, first: its stage and its first microbatch in either stream.
    """

    stages: tuple[int, int]
    first: tuple[int, int]
    order: list[Action] = field(default_factory=list)
    together: list[Pair] = field(default_factory=list)
    ahead: list[int] = field(default_factory=lambda: [0, 0])
    back: list[int] = field(default_factory=lambda: [0, 0])
    weights: deque[Action] = field(default_factory=deque)

    def play(self, half: int, depth: int, each: int) -> _Worker:
        """The whole step. half: workers to the middle. depth: workers before this one."""
        rest = half - depth - 1
        for _ in range(2 * rest):
            self._forward(0)
        for _ in range(depth + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(rest):
            self._split(1)
            self._weight()
            self._forward(1)
        for i in range(each - 2 * half + depth + 1):
            self._pair(0, 1, apart=i == 0 and rest == 0)  # the middle has nothing to wait for yet
            self._pair(1, 0)
        for _ in range(rest):
            self._backward(1)
            self._pair(1, 0)
        self._drain(depth + 1)
        for _ in range(rest):
            self._weight()
            self._split(0)
        while self.weights:
            self._weight()
        return self

    def _drain(self, pairs: int) -> None:
        """The last backwards of both streams, the second half of them with weights put off."""
        for i in range(2 * pairs):
            (self._split if i >= pairs else self._backward)(1 - i % 2)

    def _forward(self, stream: int) -> None:
        self.order.append(forward(self.stages[stream], self.first[stream] + self.ahead[stream]))
        self.ahead[stream] += 1

    def _backward(self, stream: int) -> None:
        self.order.append(backward(self.stages[stream], self.first[stream] + self.back[stream]))
        self.back[stream] += 1

    def _split(self, stream: int) -> None:
        stage, microbatch = self.stages[stream], self.first[stream] + self.back[stream]
        self.order.append(of_input(stage, microbatch))
        self.weights.append(of_weight(stage, microbatch))
        self.back[stream] += 1

    def _weight(self) -> None:
        self.order.append(self.weights.popleft())

    def _pair(self, ahead: int, back: int, apart: bool = False) -> None:
        """A forward of one stream with a backward of the other, as one unless apart."""
        if not apart:
            self.together.append((self.stages[ahead], self.first[ahead] + self.ahead[ahead]))
        self._forward(ahead)
        self._backward(back)
