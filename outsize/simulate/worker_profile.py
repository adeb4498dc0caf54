"""What a plan's actions take on one worker, alone: measured, for forecasts of several workers.

A model with as many layers of each sort as a worker has, and the whole prologue and epilogue, makes
a few steps. (One layer of each sort gives the same on a 25M model, within 3%; where a layer fits
into a cache that a worker's layers do not fit into, it would not.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from outsize.collectives import Lone, Mesh
from outsize.collectives.collective import AllGather, Call, Handle
from outsize.collectives.pretend import Pretend
from outsize.data import Batch
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.cuts import Cut
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.parallel.divide import divide
from outsize.plan import Plan, Sharding, Stage
from outsize.plan.approximate import PARTIAL
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.schedule import Kind, Lane

WARM, COUNTED = 1, 3  # steps; the first of a process pays for page faults and kernel set-up
TURNS = 4  # microbatches of a step
Durations = Mapping[tuple[str, int], float]  # seconds by the label of an action and its stage
Batches = Callable[[int], Batch]  # of so many rows


@dataclass(frozen=True)
class Profiled:
    """The plan and the model of one worker. whole, here: by segment of the whole model and of this
    one, which sort it is. workers: over which the ends are cut, where they are."""

    plan: Plan
    config: DecoderConfig
    whole: tuple[int, ...]
    here: tuple[int, ...]
    workers: int = 1

    def build(self) -> tuple[Decoder, Mapping[str, Cut]]:
        """The model, on the processor, and how its parameters are cut."""
        model = build(self.config, seed=0)
        return model, divide(model, Lone(), self.plan, line=_Alike(self.workers, 0))


class _Alike(Pretend):
    """A group whose other workers have what this one has: there are numbers to compute with."""

    def start(self, call: Call) -> Handle:
        if isinstance(call, AllGather):
            for first, last in call.spans:
                call.out[first:last] = call.mine[: last - first]
        return super().start(call)


def profiled(plan: Plan, config: DecoderConfig) -> Profiled:
    """As many layers of each sort as a worker of the pipeline has, in TURNS microbatches or as many
    as there are. The tensor axis has one worker: layers are whole."""
    assert plan.mesh.tensor == 1, "layers that are cut cannot be timed alone"
    how = {
        segment: replace(stage, first=0, last=1)
        for stage in plan.stages
        for segment in range(stage.first, stage.last)
    }
    kinds: list[tuple[object, Stage]] = [("prologue", how[0])]
    kinds += [(layer, how[i]) for i, layer in enumerate(config.layers, start=1)]
    kinds += [("epilogue", how[plan.segments - 1])]
    names = list(dict.fromkeys(kinds))
    whole = tuple(names.index(kind) for kind in kinds)
    each = -(-len(config.layers) // plan.mesh.pipeline)
    taken = [i for i, sort in enumerate(whole) if whole[:i].count(sort) < each]
    stages = tuple(replace(how[i], first=n, last=n + 1) for n, i in enumerate(taken))
    rest = tuple(name for name in plan.approximate if name != PARTIAL)  # one worker skips nothing
    single = replace(
        plan, segments=len(taken), stages=stages, budget=None, mesh=Mesh(), shards=Sharding(),
        pipeline=plan.pipeline.cutting, order="microbatch", approximate=rest,
        rows=plan.microbatch_size * min(TURNS, plan.microbatches),
        microbatch_rows=plan.microbatch_size, row_shares=(),
    )  # fmt: skip
    layers = tuple(config.layers[i - 1] for i in taken[1:-1])
    here = tuple(whole[i] for i in taken)
    return Profiled(single, replace(config, layers=layers), whole, here, plan.mesh.pipeline)


def durations(
    plan: Plan,
    config: DecoderConfig,
    optimizer: Optimizer,
    clip: float | None,
    batch_of: Batches,
) -> Durations:
    """Median seconds by label and by stage of the plan, also of both gradients apart. NORM of a
    stage is its part of the whole model's; exchanges with others are left out.

    batch_of: real rows, for their documents decide what attention costs.
    """
    chosen = profiled(plan, config)
    (model, cuts), batch = chosen.build(), batch_of(chosen.plan.rows)
    times: dict[tuple[str, int], list[float]] = {}
    for apart in (False, True):
        each = replace(chosen.plan, split_backward=apart)
        job = Job(NativeFlow(model, each), each, Recipe(optimizer, clip), cuts=cuts)
        _measure(job, batch, chosen, times)
        job.close()
    found: dict[tuple[str, int], float] = {}
    loses = plan.pipeline.ends is None
    for (label, sort), values in times.items():
        for stage, said in enumerate(plan.stages):
            count = chosen.whole[said.first : said.last].count(sort)
            if count:
                # Blocks in the stage that makes the losses are a part of its LOSS.
                joins = loses and label == Kind.FORWARD and stage == len(plan.stages) - 1
                key = (Kind.LOSS if joins else label, stage)
                found[key] = found.get(key, 0.0) + count * median(values)
    return found


def _measure(
    job: Job, batch: Batch, chosen: Profiled, times: dict[tuple[str, int], list[float]]
) -> None:
    """Seconds of every action by its label and the sort of its segment."""
    numel = dict.fromkeys(chosen.here, 0)
    for chunk in job.chunks:
        sort = chosen.here[chunk.table.segment]
        numel[sort] += chunk.table.numel // chosen.here.count(sort)
    every = sum(numel[sort] for sort in chosen.here)
    for step in range(WARM + COUNTED):
        job.step(batch, lr=0.0)
        events = job.report.trace.events if step >= WARM else ()
        for event in (e for e in events if e.lane not in (Lane.EXCHANGE, Lane.COPY)):
            took = event.end - event.start
            if event.kind == Kind.NORM:
                for sort, count in numel.items():
                    times.setdefault((event.kind, sort), []).append(took * count / every)
            else:
                times.setdefault((event.kind, chosen.here[event.stage]), []).append(took)


def work(
    plan: Plan,
    config: DecoderConfig,
    optimizer: Optimizer,
    batch_of: Batches,
) -> Callable[[], object]:
    """A step of a microbatch like the plan's, on one worker; for what else has to be tried."""
    chosen = profiled(plan, config)
    short = replace(chosen.plan, rows=chosen.plan.microbatch_rows)
    (model, cuts), batch = chosen.build(), batch_of(short.rows)
    job = Job(NativeFlow(model, short), short, Recipe(optimizer), cuts=cuts)
    return lambda: job.step(batch, lr=0.0)
