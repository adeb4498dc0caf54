"""Pipelines on emulated devices, for claims: the product's plans, schedules, engine and messages in
a process a worker, whose passes wait as long as a device would take.

A pass computes a tiny model and then waits until its time is over. `Way` is of equal stages, whose
backward passes take two forward passes (F = I = W). So a step is as long as
what the workers really wait for makes it, and no event is predicted; what messages, sums over
copies, updates and the order of threads take is this machine's, as long as it keeps up: `busy` says
whether it did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sharded
import torch
from sharded import Steps

from outsize.collectives import Collective, Joined, Mesh, Use
from outsize.collectives.collective import DONE, Call, Handle
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.plan import Pipelined, Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.ends import ends_of
from outsize.schedule.pipelines.costs import EndCosts

TOKENS, STEPS, WARM = 8, 3, 1  # of a row; steps, of which the first are not timed
BACK = 2  # forward passes that a backward pass takes
EMULATED = (
    "emulated devices: real workers, schedule, engine and messages, passes that wait; equal stages,"
    " F = I = W"
)


def waiting(run: Callable[[], object], seconds: float) -> None:
    """Do it, and wait until so many seconds are over."""
    end = time.perf_counter() + seconds
    run()
    time.sleep(max(0.0, end - time.perf_counter()))


@dataclass(frozen=True)
class Device:
    """What passes of a microbatch take. stages: by stage of the plan, seconds forward and back.
    ends: of the first and the last layer where all workers share these. sum: seconds of a stage's
    sum over the workers that have copies of it, beside which they compute."""

    stages: tuple[tuple[float, float], ...]
    ends: EndCosts | None = None
    sum: float = 0.0


class Walk:
    """A walk whose passes take their time."""

    def __init__(self, inner: Any, device: Device) -> None:
        self._inner, self._device = inner, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, stage: int) -> None:
        waiting(partial(self._inner.forward, stage), self._device.stages[stage][0])

    def backward(self, stage: int) -> None:
        waiting(partial(self._inner.backward, stage), self._device.stages[stage][1])


class Shared:
    """Parts of the first and the last layer whose passes take their time; or what carries these
    passes out."""

    def __init__(self, inner: Any, seconds: Callable[[Any], float]) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def handler(self, *words: Any) -> Shared:
        return Shared(self._inner.handler(*words), self._seconds)

    def bind(self, action: Any, index: int, points: Any) -> Any:
        deed = self._inner.bind(action, index, points)
        return replace(deed, run=partial(waiting, deed.run, self._seconds(action.kind)))


class Summing(Collective):
    """A collective each of whose operations takes its time."""

    def __init__(self, inner: Collective, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds
        self.size, self.rank, self.received = inner.size, inner.rank, inner.received

    def start(self, call: Call) -> Handle:
        waiting(lambda: self.inner.start(call).wait(), self.seconds)
        return DONE


class Around:
    """A world in which sums over copies of a stage take their time."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        made = self._inner.group(ranks, use)
        return Summing(made, self._seconds) if use == "merge" else made


class Flow(NativeFlow):
    """A decoder on an emulated device."""

    device_of_claim: Device

    def begin(self, *words: Any, **named: Any) -> Any:
        return Walk(super().begin(*words, **named), self.device_of_claim)

    def paced(self, device: Device, workers: int) -> Flow:
        """Itself, on this device."""
        self.device_of_claim = device
        ends = ends_of(self.plan.pipeline)
        costs = device.ends
        if ends is not None and costs is not None:
            self.rows = Shared(self.rows, lambda kind: costs.of_pass(kind, ends, workers))
        return self


@dataclass(frozen=True)
class Paced(Steps):
    """Steps of one worker on an emulated device."""

    device: Device = Device(())

    def __call__(self, world: Joined) -> Any:
        model = build(self.config, seed=0, dtype=torch.float64)
        cuts = divide(model, world, self.plan)
        flow = Flow(model, self.plan).paced(self.device, self.plan.mesh.pipeline)
        job = Job(flow, self.plan, Recipe(AdamW()), Here(Around(world, self.device.sum)), cuts=cuts)
        losses, took = [], []
        for step in range(self.steps):
            rows = sharded.batch_of(self.config, self.plan, step)
            before = os.times()
            losses.append(float(job.step(rows, 1e-3)))
            now = os.times()
            took.append((job.report.seconds, now.user + now.system - before.user - before.system))
        return losses, min(took[WARM:])


@dataclass(frozen=True)
class Way:
    """A schedule with so many workers and microbatches. depth: stages of the model, which all
    workers share; model: seconds of a whole step of one device, forward and back, which the
    microbatches share. sum: of a stage's gradients over its copies, over its forward pass."""

    schedule: str
    workers: int
    microbatches: int
    depth: int
    model: float
    sum: float = 0.0

    def __str__(self) -> str:
        return f"{self.schedule}, {self.workers} workers, {self.microbatches} microbatches"

    @property
    def each(self) -> float:
        """Seconds of a stage's forward pass of a microbatch."""
        return self.model / (1 + BACK) / self.depth / self.microbatches

    def steps(self) -> Paced:
        config = sharded.llama(16, self.depth - 2, 2, 64, 32)
        plan = Plan(
            self.depth, per_segment(self.depth), self.microbatches, 1, TOKENS,
            Precision.named("float64"), 64, mesh=Mesh(pipeline=self.workers),
            pipeline=Pipelined(self.schedule),
        )  # fmt: skip
        passes = (self.each, BACK * self.each)
        return Paced(
            config, plan, STEPS, device=Device((passes,) * self.depth, sum=self.sum * self.each)
        )


@dataclass(frozen=True)
class Taken:
    """Of a way: seconds of a step, of its slowest worker; speedup: over one device; busy: the part
    of both cores that the workers' processors had; loss: of the last step."""

    seconds: float
    speedup: float
    busy: float
    loss: float


def take(ways: Sequence[Way]) -> list[Taken]:
    """What each way took, all with as many workers, in turn."""
    return measured({str(way): way.steps() for way in ways}, [way.model for way in ways])


def measured(works: Mapping[str, Paced], models: Sequence[float]) -> list[Taken]:
    """What steps took, by name, on as many workers each. models: seconds of one device's step."""
    found = []
    every = zip(works, models, sharded.run(*works.values()), strict=True)
    for name, model, workers in every:
        seconds = max(took[0] for _, took in workers)
        busy = sum(took[1] for _, took in workers) / seconds / (os.cpu_count() or 1)
        found.append(Taken(seconds, model / seconds, busy, workers[0][0][-1]))
        print(
            f"  {name}: a step {seconds:.3f} s, {model / seconds:.3f} times as fast as one device,"
            f" {busy:.0%} of the cores",
            flush=True,
        )
    return found
