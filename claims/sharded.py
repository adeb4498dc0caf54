"""What the claims about workers share: real ones as processes of this machine, links that are slow
on purpose, and forecasts on the clusters of papers."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import FileStore, PrefixStore

from outsize.collectives import (
    Collective,
    Joined,
    Mesh,
    Use,
    World,
    along,
    everyone,
    join,
    received,
)
from outsize.collectives.collective import DONE, Call, Handle
from outsize.data import Batch
from outsize.hardware import Hardware, Rate, catalogue
from outsize.hardware.hardware import Link
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.parallel.tensor.decoder import split
from outsize.plan import Plan, Precision, Sharding
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind, Lane, Schedule
from outsize.search import PlanRequest
from outsize.search.request import Forecaster, facts_of_model
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs
from outsize.simulate.forecast import compose
from outsize.trace.trace import Event, Trace

DATE = "2026-11-22"
# What the papers call mixed precision: 2 bytes of parameters, 2 of gradients, 12 of the optimizer.
MIXED = Precision("bfloat16", "float32", "bfloat16", "float32")


def llama(hidden: int, layers: int, heads: int, vocab: int, inner: int, groups: int = 0) -> Any:
    sizes = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups or heads, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return parse(sizes)


SMALL = llama(64, 4, 4, 512, 160)


def plan_of(
    config: DecoderConfig,
    mesh: Mesh,
    shards: Sharding,
    rows: int,
    sequence: int,
    microbatches: int = 1,
    precision: Precision | None = None,
    recompute: tuple[str, ...] = (),
    **more: Any,
) -> Plan:
    """Every segment a stage. rows: of each worker of the data axis."""
    count = len(config.layers) + 2
    return Plan(
        count, per_segment(count, recompute), rows * mesh.data, rows // microbatches, sequence,
        precision or Precision.named("float64"), 512, mesh=mesh, shards=shards, **more,
    )  # fmt: skip


def batch_of(config: DecoderConfig, plan: Plan, seed: int = 0) -> Batch:
    """The rows of a whole step."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab, (plan.rows, plan.sequence + 1), generator=generator)
    return Batch(ids[:, :-1], ids[:, 1:], ((0, plan.sequence),) * plan.rows)


def job_of(config: DecoderConfig, plan: Plan, world: World) -> Job:
    dtype = getattr(torch, plan.precision.master or plan.precision.compute)
    model = build(config, seed=0, dtype=dtype)
    cuts = split(model, along(world, "tensor"), plan.sequence_parallel)
    return Job(NativeFlow(model, plan), plan, Recipe(AdamW(), 1.0), Here(world), cuts=cuts)


# -- real workers ----------------------------------------------------------------------------------


def _work(
    rank: int, size: int, path: str, hosts: Sequence[str], works: Sequence[Steps], results: Any
) -> None:
    torch.set_num_threads(1)
    store, host = FileStore(path, size), hosts[rank] if hosts else ""
    found = []
    for number, work in enumerate(works):
        world = join(work.plan.mesh, rank, PrefixStore(str(number), store), host=host)
        found.append(work(world))
        everyone(world).barrier()
        world.close()
    results.put((rank, found))


def run(*works: Steps, hosts: Sequence[str] = ()) -> list[list[Ran]]:
    """What each worker's steps gave, for each of the works in turn, in a process a worker. hosts:
    by rank, names of machines that they shall take themselves to be on."""
    size = works[0].plan.mesh.size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sharded"])
    # Python 3.11 looks for it where a new process would, and is silent about what is not there.
    with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parent)):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=_work, args=(r, size, path, hosts, works, results))
            for r in range(size)
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=900) for _ in processes)
        for process in processes:
            process.join()
    return [[found[rank][number] for rank in range(size)] for number in range(len(works))]


@dataclass(frozen=True)
class Ran:
    """What one worker's steps gave. bytes, far: had from others in the last step, and of these from
    other hosts; held: bytes of its states; seconds: the best step's; trace: the last one's."""

    losses: list[float]
    weights: Mapping[str, np.ndarray]
    bytes: float
    far: float
    held: int
    pool: int
    seconds: float
    trace: Trace

    def apart(self, other: Ran) -> float:
        """The largest difference of losses and weights, relative to the largest of each tensor."""
        pairs = zip(self.losses, other.losses, strict=True)
        worst = max(abs(a / b - 1) for a, b in pairs)
        for name, weight in self.weights.items():
            there = other.weights[name]
            worst = max(worst, float(np.abs(weight - there).max() / np.abs(there).max()))
        return worst


@dataclass(frozen=True)
class Steps:
    """Steps of one worker: what `run` calls. slow: bytes a second of a link that is waited for."""

    config: DecoderConfig
    plan: Plan
    steps: int = 2
    slow: float = 0.0
    change: Callable[[Schedule], Schedule] | None = None

    def __call__(self, world: Joined) -> Ran:
        job = job_of(self.config, self.plan, Slow(world, self.slow) if self.slow else world)
        if self.change is not None:
            job.loaded = job.playable(self.change(job.schedule))
        losses, seconds, before, far = [], [], 0, 0.0
        for step in range(self.steps):
            before, far = received(world).total(), world.across()
            mine = batch_of(self.config, self.plan, step).rows(*self.plan.rows_at(job.place))
            losses.append(float(job.step(mine, 1e-3)))
            seconds.append(job.report.seconds)
        had = received(world).total() - before
        far, held, trace = world.across() - far, held_by(job), job.report.trace
        # Tensors would travel as files that are gone when their worker is.
        weights = {name: weight.numpy().copy() for name, weight in job.weights()}
        pool = job.placement.pool
        return Ran(losses, weights, had, far, held, pool, min(seconds), trace)


def held_by(job: Job) -> int:
    """Bytes of a job's states between uses, without the pool that parts pass through."""
    total = 0
    for chunk in job.chunks:
        mine = {**chunk.optimizer, **chunk.shards}
        if "parameters" not in mine:
            mine["parameters"] = chunk.parameters
        if chunk.table.trainable and "gradients" not in mine and chunk.gradients is not None:
            mine["gradients"] = chunk.gradients
        if chunk.master is not None:
            mine["master"] = chunk.master
        total += sum(tensor.nbytes for tensor in mine.values())
    return total


class Waiting(Collective):
    """A collective after whose every operation its worker waits as long as a link would take."""

    def __init__(self, inner: Collective, rate: float) -> None:
        self.inner, self.rate = inner, rate
        self.size, self.rank, self.received = inner.size, inner.rank, inner.received

    def start(self, call: Call) -> Handle:
        before, begin = sum(self.received.values()), time.perf_counter()
        self.inner.start(call).wait()
        had = sum(self.received.values()) - before
        time.sleep(max(0.0, had / self.rate - (time.perf_counter() - begin)))
        return DONE


class Slow:
    """A world whose states travel over a slow link; the few numbers that all agree on do not."""

    def __init__(self, world: World, rate: float) -> None:
        self.world, self.rate, self.mesh, self.rank = world, rate, world.mesh, world.rank

    def group(self, ranks: Sequence[int], use: Use = "compute") -> Collective:
        made = self.world.group(ranks, use)
        return Waiting(made, self.rate) if use == "network" else made


# -- traces ----------------------------------------------------------------------------------------


def hidden(trace: Trace) -> tuple[float, float]:
    """(seconds of the network lane, the share of them in which a pass computes)."""
    passes = {str(kind) for kind in (Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.RECOMPUTE)}
    computing = [e for e in trace.events if e.kind in passes]
    network = [e for e in trace.events if e.lane == Lane.NETWORK.value]
    total = sum(event.end - event.start for event in network)
    under = sum(_common(a, b) for a in network for b in computing)
    return total, under / total if total else 1.0


def _common(one: Event, other: Event) -> float:
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def sums_last(schedule: Schedule) -> Schedule:
    """The schedule with every sum of gradients behind the whole backward pass."""
    actions = schedule.workers[0]
    sums = [a for a in actions if a.kind is Kind.REDUCE]
    others = [a for a in actions if a.kind is not Kind.REDUCE]
    at = next(i for i, a in enumerate(others) if a.kind is Kind.NORM)
    return replace(schedule, workers=((*others[:at], *sums, *others[at:]),))


# -- forecasts -------------------------------------------------------------------------------------


def cluster(
    name: str, count: int, reached: float, links: Sequence[tuple[int, float]] = (),
    network: float = 0.0, wait: float = 0.0,
) -> Hardware:  # fmt: skip
    """Machines of `count` devices at this part of their peak. links: (neighbours that it joins,
    GB/s); network: GB/s of each device to other machines; both the catalogue's where left out.
    wait: seconds of a message."""
    made = catalogue(name, count)
    (device,) = made.devices
    peak = dict(device.peak)
    if "bf16" not in peak:
        peak["bf16"] = peak["fp16"]
    slower = {dtype: replace(r, value=r.value * reached, upto=None) for dtype, r in peak.items()}
    latency = Rate(wait, "s", "declared", DATE) if wait else None
    joined = [Link("fabric", "devices", _gbps(rate), joins=joins) for joins, rate in links]
    outer = [Link("network", "nodes", _gbps(network))] if network else []
    kinds = {link.between for link in (*joined, *outer)}
    others = [link for link in made.links if link.between not in kinds]
    every = tuple(replace(link, latency=latency) for link in (*joined, *outer, *others))
    return replace(made, devices=(replace(device, peak=slower),), links=every)


def _gbps(value: float) -> Rate:
    return Rate(value * 1e9, "B/s", "declared", DATE)


@dataclass
class Predicted:
    """Forecasts of plans of one model that differ in their workers only."""

    config: DecoderConfig
    precision: Precision

    def __post_init__(self) -> None:
        self._oracles: dict[Any, Forecaster] = {}

    def costs(self, plan: Plan) -> Costs:
        """Of a plan's actions."""
        (found,) = self._forecaster(plan).costs(plan)
        return found

    def of(self, plan: Plan, hardware: Hardware) -> Forecast:
        """What a plan holds and takes on a cluster."""
        return compose(plan, self.costs(plan), hardware)

    def _forecaster(self, plan: Plan) -> Forecaster:
        key = (plan.mesh.tensor, plan.sequence_parallel)
        if key not in self._oracles:
            request = PlanRequest(
                plan.rows, plan.sequence, self.precision, AdamW(), clip=1.0,
                documents=(0, plan.sequence), mesh=plan.mesh,
                sequence_parallel=plan.sequence_parallel,
            )  # fmt: skip
            facts = facts_of_model(self.config, request)
            self._oracles[key] = Forecaster(self.config, request, catalogue("H200"), facts)
        return self._oracles[key]


def numel(config: DecoderConfig) -> int:
    return sum(parameter.numel() for parameter in build(config).parameters())


def far(made: Forecast) -> float:
    """Bytes that a worker has from other machines in a step."""
    return sum(part.far for part in made.received.values())


def foretold(made: Forecast) -> float:
    """Bytes that a worker has from others in a step."""
    return sum(part.total for part in made.received.values())


def degrees(data: int, among: Sequence[int]) -> Iterator[Sharding]:
    """All that a data axis can have, of some degrees."""
    for optimizer in among:
        for gradients in (g for g in among if optimizer % g == 0):
            for parameters in (p for p in among if gradients % p == 0):
                if data % optimizer == 0:
                    yield Sharding(parameters, gradients, optimizer)
