"""What a user requests of a plan, and how native decoders are rehearsed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from outsize.collectives import Mesh
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.data import Batch
from outsize.hardware import Hardware
from outsize.memory import Ledger
from outsize.memory.tiers import TierSpec
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.dropout import Noise
from outsize.optim import Optimizer
from outsize.plan import Pipelined, Plan, Precision, Sharding
from outsize.plan.approximate import PARTIAL
from outsize.plan.plan import per_segment
from outsize.plan.settings import NONE, Extended, Settings, extended
from outsize.plan.spread import AUTO, pipelined
from outsize.runtime import Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.starting import Filling
from outsize.search.pipeline_cuts import composed
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs, Facts, facts_of
from outsize.simulate.kept import kept
from outsize.simulate.nowhere import nowhere
from outsize.simulate.rehearse import bare, rehearse, splits_of, stacked
from outsize.simulate.sample import Sample, expand, sample

# Where memory allows: calls cost less the larger they are. 25M model, 2 cores: 2, 4, 8 rows of 512
# gave 1,640, 1,750, 1,780 tokens/s in float32 and 3,800, 4,050, 4,340 in bfloat16.
TOKENS_AT_ONCE = 4096
LOGIT_TOKENS = 512  # logits of so many tokens at once: products lose nothing, memory stays small
SCHEDULE = "1f1b"  # as short a step as GPipe's, and it holds fewer microbatches


@extended
@dataclass(frozen=True)
class PlanRequest(Extended):
    """What the user has fixed; None where the planner chooses.

    documents: cumulative offsets (0, ..., sequence) of the documents in a row where every row has
    the same; None where rows hold documents of any lengths, and the costliest are predicted.
    tiers: below the device, on which states may rest, the preferred ones first; the hardware of a
    forecast has a tier of the same name with measured rates for each. dropout: its rate.
    weighed: whether targets have weights.
    mesh, shards, sequence_parallel: the workers, as a plan has them. pipeline: its schedule, with
    its cuts where it is a plan's own; None: one with a stage for each worker. filling: how the
    model's first values come. techniques, rates: as Recipe has them. tiled: whether a block's
    tokens can be computed in parts, as those of somebody's own module cannot; whole: whether
    documents stay whole where nobody has said otherwise, as some adapters need them. tokens: of a
    row of such a module, if it was seen to run in chunks of them, else 0. few: microbatches are as
    said, even if there are more workers. settings: those of plans that are fixed. apart: the device
    has memory of its own, to which microbatches are copied. kind: of device, whose operators are
    rehearsed; grain: bytes of which it gives whole multiples. at_once, logits: tokens of a
    microbatch, and those whose logits exist at once, that a search begins with.
    """

    rows: int
    sequence: int
    precision: Precision
    optimizer: Optimizer
    clip: float | None = None
    budget: int | None = None
    microbatch_rows: int | None = None
    recompute: tuple[str, ...] | None = None
    loss_chunk: int | None = None
    mlp_tile: int | None = None
    split_backward: bool = False
    approximate: tuple[str, ...] = ()
    documents: tuple[int, ...] | None = None
    tiers: tuple[TierSpec, ...] = ()
    order: Literal["microbatch", "layer"] | None = None
    dropout: float = 0.0
    weighed: bool = False
    mesh: Mesh = field(default_factory=Mesh)
    shards: Sharding | None = None
    sequence_parallel: bool | None = False
    gathered: int = 2  # stages whose weights are gathered at once, where they are cut
    pipeline: str | Pipelined | None = None
    filling: Filling = field(default_factory=Filling)
    techniques: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    tiled: bool = True
    whole: bool = False
    tokens: int = 0
    few: bool = False
    apart: bool = False
    kind: str = "cpu"
    grain: int = 1
    at_once: int = TOKENS_AT_ONCE
    logits: int = LOGIT_TOKENS
    settings: Settings = NONE

    @property
    def schedule(self) -> Pipelined:
        """Of the pipeline as said; SCHEDULE, from which a search begins, where it is open."""
        return replace(self._said, schedule=SCHEDULE) if self.searched else self._said

    @property
    def _said(self) -> Pipelined:
        said = self.pipeline or SCHEDULE
        return pipelined(said) if isinstance(said, str) else said

    @property
    def behind(self) -> bool:
        """Whether a stage may be updated before the norm of all gradients is known."""
        return self.clip is None and not self.precision.scaled

    @property
    def searched(self) -> bool:
        """Whether the planner chooses the schedule, or orders of the plan's own."""
        return self._said.schedule == AUTO and not self._said.orders

    @property
    def recipe(self) -> Recipe:
        """How the job trains that is planned."""
        return Recipe(self.optimizer, self.clip, techniques=self.techniques, rates=self.rates)

    @property
    def rehearsed(self) -> PlanRequest:
        """What a plan's actions are rehearsed with: all that a plan says itself, and what guides
        the search for one, is left out."""
        return PlanRequest(
            self.rows, self.sequence, self.precision, self.optimizer, self.clip,
            dropout=self.dropout, weighed=self.weighed, mesh=self.mesh, techniques=self.techniques,
            rates=self.rates, apart=self.apart, kind=self.kind, grain=self.grain,
        )  # fmt: skip

    def ledger(self) -> Ledger:
        """Counts what a rehearsal holds."""
        return Ledger(device=self.kind, grain=self.grain)

    def noise(self) -> Noise | None:
        """That of a batch that is predicted."""
        return Noise(self.dropout, 0, 0) if self.dropout else None

    def batch(self, rows: int, bounds: tuple[int, ...]) -> Batch:
        """One that is predicted: so many rows, these documents in each."""
        ids = torch.zeros(rows, self.sequence, dtype=torch.int64)
        weights = torch.ones(ids.shape) if self.weighed else None
        return Batch(ids, torch.zeros_like(ids), (bounds,) * rows, self.noise(), weights)


Makers = tuple[Callable[[Plan, Ledger], Job], Callable[[int], object]]


def layouts(request: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """The documents of a row to rehearse: one of these layouts holds the most of all.

    A document of a length that kernels like needs no copies, one beside it does; scores that are
    made explicitly (windows, caps) are most for the longest document.
    """
    if request.documents is not None:
        return (request.documents,)
    whole = (0, request.sequence)
    return ((0, 1, request.sequence), whole) if request.sequence > 1 else (whole,)


def native_makers(
    config: DecoderConfig,
    request: PlanRequest,
    documents: tuple[int, ...] | None = None,
    turn: int = 0,
) -> Makers:
    """How a rehearsal makes a native decoder's job, and a batch of whole rows.

    documents: of every row; by default the first of `layouts`. turn: the worker's place on the
    pipeline axis of a plan that has one.
    """
    bounds = documents or layouts(request)[0]

    def job_of(plan: Plan, ledger: Ledger) -> Job:
        world = PretendWorld(plan.mesh, _largest(plan) + turn * plan.mesh.stride("pipeline"))
        # What a pipeline cuts is largest on the last one, too.
        line = Pretend(request.mesh.pipeline, request.mesh.pipeline - 1)
        stores = nowhere(plan, memories(request.tiers))
        here = Here(world, ledger, stores, line=line, apart=request.apart)
        with torch.device(request.kind):
            model = Decoder(config)
        return make_job(NativeModel(model), plan, request.recipe, here)

    return job_of, lambda rows: request.batch(rows, bounds)


def _largest(plan: Plan) -> int:
    """The worker with the largest parts of weights, the last one of axes that cut some; where rows
    have shares, with the most of them."""
    mesh, place, found = plan.mesh, plan.busiest, 0
    rows = mesh.cutting("rows") if plan.row_shares else ()
    for axis in reversed(mesh.axes):
        if axis.name in rows:
            place, digit = divmod(place, mesh[axis.name])
            found += digit * mesh.stride(axis.name)
        elif axis.parts or axis.cuts == "weights":
            found += (mesh[axis.name] - 1) * mesh.stride(axis.name)
    return found


def facts_of_model(config: DecoderConfig, request: PlanRequest) -> Facts:
    """What the placement of plans needs of a native decoder."""
    asked, plan = replace(request.rehearsed, clip=None), _plainest(config, request)
    facts = kept(Facts, (config, asked, plan), partial(_facts, config, asked, plan))
    return known_of(request, facts)


def _plainest(config: DecoderConfig, request: PlanRequest) -> Plan:
    """A microbatch of one row, of whose job facts are read."""
    segments = len(config.layers) + 2
    mesh = request.mesh.having(data=1, pipeline=1)
    exact = tuple(name for name in request.approximate if name != PARTIAL)
    return Plan(
        segments, per_segment(segments), mesh.rows, precision=request.precision, approximate=exact,
        mesh=mesh, sequence_parallel=bool(request.sequence_parallel),
        pipeline=request.schedule.cutting if request.mesh.pipeline > 1 else Pipelined(),
        settings=request.settings.laying,
    )  # fmt: skip


def _facts(config: DecoderConfig, request: PlanRequest, plan: Plan) -> Facts:
    from outsize.simulate.fake import FakeMode

    job_of, _ = native_makers(config, request)
    with FakeMode():
        return facts_of(job_of(plan, request.ledger()))


def known_of(request: PlanRequest, facts: Facts) -> Facts:
    """Facts of a model with what a request knows beside it."""
    host = memories(request.tiers)
    return replace(facts, host=host, filling=request.filling, grain=request.grain)


def memories(tiers: Iterable[TierSpec]) -> frozenset[str]:
    """Those of some tiers that are memory, where parts can be updated as they rest."""
    return frozenset(tier.name for tier in tiers if tier.medium == "memory")


@dataclass
class Forecaster:
    """Forecasts of a native decoder's plans. Plans that differ only in where states rest and in how
    many layers are computed how share what was rehearsed."""

    config: DecoderConfig
    request: PlanRequest
    hardware: Hardware
    facts: Facts
    _known: dict[tuple[object, ...], Costs] = field(default_factory=dict)

    def asking(self, request: PlanRequest) -> Forecaster:
        """The same of another schedule."""
        return replace(self, request=request)

    def costs(self, plan: Plan) -> list[Costs]:
        """Costs of a plan's actions, for each of the request's `layouts`."""
        splits = splits_of(plan)
        chosen = sample(self.config, stacked(plan), any(splits))
        return [
            expand(self._rehearsed(chosen, bounds, splits), chosen, plan, self.facts)
            for bounds in layouts(self.request)
        ]

    def forecast(self, plan: Plan) -> Forecast:
        """With the costliest of the layouts."""
        return composed(plan, self.costs(plan), self.hardware)

    def _rehearsed(
        self, chosen: Sample, bounds: tuple[int, ...], splits: tuple[bool, ...]
    ) -> Costs:
        key = (bare(chosen.plan), chosen.config.layers, bounds, splits)
        if key not in self._known:
            makers = native_makers(chosen.config, self.request, bounds)
            apart = self.hardware.devices[0].apart
            find = partial(rehearse, chosen.plan, *makers, splits, self.request.ledger, apart=apart)
            step = chosen.plan.own_rows, chosen.plan.microbatches, bare(chosen.plan)
            about = chosen.config, self.request.rehearsed, step, bounds, splits, apart
            self._known[key] = kept(Costs, about, find)
        return self._known[key]
