"""The same training under the plan, as one of its workers does it."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize import accelerator
from outsize.collectives import Use, World, everyone, received
from outsize.collectives.world import LAYERS
from outsize.errors import OutsizeError
from outsize.memory.store import Store
from outsize.memory.tiers import TierSpec, open_stores
from outsize.optim import Optimizer, StateSpec
from outsize.optim.optimizer import Apart, Rates
from outsize.plan import Plan
from outsize.runtime import Job
from outsize.runtime.making import make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.storage.weight_pool import NO_STORES
from outsize.train.state import copied, give
from outsize.train.tiers import named
from outsize.verify.case import Case
from outsize.verify.plain import Step
from outsize.verify.volume import Volume, volume

GRADIENT = "gradient"
CAPACITY = 1 << 25  # bytes of a tier for one worker: cases are small
# That came: over the network lane's groups, over the computing thread's, between stages.
Bytes = tuple[int, int, int]


@dataclass(frozen=True)
class Sent:
    """Bytes that all workers together had from others in one step. network: states; compute: what
    layers, the loss and the norm say; stages: between stages of a pipeline; formula: what they
    should be."""

    network: int
    compute: int
    formula: Volume
    stages: int = 0


@dataclass(frozen=True)
class Run:
    """What one worker has at the end. steps: the first worker's, whole; of the others none. differ:
    the workers whose losses, norms, gradients and weights are not the first one's bit for bit."""

    steps: tuple[Step, ...]
    differ: tuple[int, ...]
    sent: Sent


class Stopped(OutsizeError):
    """A step has failed of a plan that was not refused before."""


def run(case: Case, world: World) -> Run:
    """Train as the plan says. OutsizeError for what it refuses, before the first step; after it,
    Stopped."""
    with stores_of(case.plan, accelerator.find(case.device)) as stores:
        return _run(case, world, stores)


def _run(case: Case, world: World, stores: Mapping[str, Store]) -> Run:
    job = make(case, world, stores)
    batches = [_rows(case, job, step) for step in range(case.steps)]
    rates, steps, prints, sent = case.rates, [], [], (0, 0, 0)
    for index, batch in enumerate(batches):
        if case.resume_at and index == case.resume_at:
            job = resumed(job, case, world, stores)
        loss, norm, touched, sent = _step(job, batch, rates[index], world)
        whole = _whole(job, loss, norm, touched)
        prints.append(_print(whole))
        if world.rank == 0:
            steps.append(whole)
    total = _sum(job, world, sent, fresh=case.steps - 1 in (0, case.resume_at))
    job.close()
    return Run(tuple(steps), _differing(prints, world), total)


def judging(name: str, workers: int) -> str:
    """The kind of device where plans are judged, as outsize.accelerator.find has it; of "auto" the
    accelerator where there is one for each worker that computes in float64. OutsizeError for one
    that does not, or is not there."""
    found = accelerator.find(name)
    exact = accelerator.computes_in(found, torch.float64)
    if name == "auto":
        enough = found.type == "cpu" or torch.accelerator.device_count() >= workers
        return found.type if exact and enough else "cpu"
    if not exact:
        raise OutsizeError(
            f"device is {name!r}, which does not compute in float64, in which verify judges;"
            " expected 'cpu' or 'auto'"
        )
    return found.type


def make(case: Case, world: World, stores: Mapping[str, Store] = NO_STORES) -> Job:
    """The job of one worker."""
    recipe = Recipe(kept(case.optimizer), case.clip, rates=case.factors)
    trainable = case.subject.trainable(case.plan, accelerator.find(case.device))
    job = make_job(trainable, case.plan, recipe, Here(world, stores=stores))
    for _ in job.weights():
        pass  # what workers ask one another once, for whole_tensors, is not of a step
    return job


def _rows(case: Case, job: Job, step: int) -> Any:
    return case.subject.rows(case.batch(step), *case.plan.rows_at(job.place))


# -- a step ----------------------------------------------------------------------------------------


def _step(
    job: Job, batch: Any, rate: float, world: World
) -> tuple[float, float, frozenset[str], Bytes]:
    """Loss, norm, the names of what was updated, and what came from others."""
    before, had = job.update_counts(), _received(world)
    try:
        loss = float(job.step(batch, rate))
    except OutsizeError as error:
        raise Stopped(str(error)) from error
    network, compute, stages = (b - a for a, b in zip(had, _received(world), strict=True))
    counts = job.update_counts()
    touched = frozenset(name for name, n in counts.items() if n > before.get(name, 0))
    return loss, job.report.norm, touched, (network, compute, stages)


def _whole(job: Job, loss: float, norm: float, touched: frozenset[str]) -> Step:
    """What the step gave, put together from all workers."""
    gradients: dict[str, Tensor | None] = {}
    read = job.reader()
    for own, _, kind in (name.rpartition(".") for name in job.state_names()):
        if kind == GRADIENT:
            state = read(own, GRADIENT)
            gradients[own] = state.to("cpu", copy=True) if own in touched else None
    weights = {name: w.to("cpu", copy=True) for name, w in job.weights() if name in gradients}
    return Step(loss, norm, gradients, weights)


def _print(step: Step) -> int:
    """A number that differs where a bit does."""
    found = zlib.crc32(repr((step.loss, step.norm)).encode())
    for tensors in (step.gradients, step.weights):
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor is not None:
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                found = zlib.crc32(flat.numpy().data, found)
    return found


def _differing(prints: Sequence[int], world: World) -> tuple[int, ...]:
    """The workers that do not have the first one's prints."""
    count, group = len(prints), everyone(world)
    spans = [(rank * count, (rank + 1) * count) for rank in range(group.size)]
    every = torch.empty(spans[-1][1], dtype=torch.int64)
    group.all_gather(torch.tensor(prints, dtype=torch.int64), spans, every)
    first, *others = every.view(group.size, count).tolist()
    return tuple(rank for rank, found in enumerate(others, start=1) if found != first)


# -- states ----------------------------------------------------------------------------------------


def resumed(job: Job, case: Case, world: World, stores: Mapping[str, Store] = NO_STORES) -> Job:
    """Another job that goes on where one was, from its states alone, whole as a checkpoint has
    them. Every worker calls it."""
    states = copied(job)
    job.close()
    fresh = make(case, world, stores)
    give(fresh, states)
    return fresh


# -- bytes -----------------------------------------------------------------------------------------


def _received(world: World) -> Bytes:
    """So far."""
    uses: tuple[tuple[Use, ...], ...] = (
        ("network", "merge"), (*LAYERS, "agreement"), ("stages", "exchange"),
    )  # fmt: skip
    network, compute, stages = (received(world, *some).total() for some in uses)
    return network, compute, stages


def _sum(job: Job, world: World, mine: Sequence[int], fresh: bool) -> Sent:
    """Of all workers. fresh: the job's first step."""
    own = volume(job, fresh)
    between = nan if own.stages is None else own.stages
    numbers = [*mine, own.states, own.tensor, own.agreement, between, float(own.exact)]
    total = torch.tensor(numbers, dtype=torch.float64)
    network, compute, stages, states, tensor, agreement, between, exact = (
        everyone(world).all_reduce(total).tolist()
    )
    known = exact == world.mesh.size
    formula = Volume(
        states, tensor, agreement, known, None if isnan(between) else between, own.rounded
    )
    return Sent(round(network), round(compute), formula, round(stages))


# -- what a case is played with --------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """`inner`, with the gradients that it is given as one state more, "gradient". States are put
    together from all workers by whoever saves checkpoints, so gradients come out whole, by name, as
    they were at the update: after every sum, the one scale and clipping."""

    inner: Optimizer
    rest: Optimizer | None

    @property
    def lr(self) -> float:
        return self.inner.lr

    @property
    def weight_decay(self) -> float:
        return self.inner.weight_decay

    @property
    def grain(self) -> int:
        return self.inner.grain

    @property
    def approximate(self) -> str | None:
        return self.inner.approximate

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (*self.inner.states, StateSpec(GRADIENT))

    def takes(self, shape: tuple[int, ...]) -> bool:
        return self.inner.takes(shape)

    def update(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], rates: Rates
    ) -> None:
        state[GRADIENT].copy_(gradients)
        self.inner.update(weights, gradients, state, rates)


@dataclass(frozen=True)
class KeptApart(Kept):
    """Of one that updates other weights than those that gradients are taken at."""

    inner: Apart

    def taken_at(self, weights: Tensor, state: Mapping[str, Tensor], out: Tensor) -> None:
        self.inner.taken_at(weights, state, out)


def kept(inner: Optimizer) -> Kept:
    """An optimizer with the gradients that it is given as one state more."""
    rest = None if inner.rest is None else kept(inner.rest)
    return KeptApart(inner, rest) if isinstance(inner, Apart) else Kept(inner, rest)


@contextmanager
def stores_of(plan: Plan, device: torch.device) -> Iterator[Mapping[str, Store]]:
    """A store for each tier that a plan names: "disk" has files, any other is memory."""
    names = sorted(named(plan))
    with tempfile.TemporaryDirectory(prefix="outsize-verify-") as folder:
        specs = {name: TierSpec(name, "memory", (), CAPACITY) for name in names}
        if "disk" in specs:
            specs["disk"] = TierSpec("disk", "disk", (Path(folder),), CAPACITY)
        with open_stores(specs.values(), device) as stores:
            yield stores
