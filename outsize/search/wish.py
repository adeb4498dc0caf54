"""What a user wishes of a plan, and how native decoders are rehearsed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.data import Batch
from outsize.hardware import Hardware
from outsize.memory import Ledger
from outsize.memory.tiers import TierSpec
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.simulate import Forecast
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import Costs, Facts, bare, facts_of, nowhere, rehearse
from outsize.simulate.sample import Sample, expand, sample


@dataclass(frozen=True)
class Wish:
    """What the user has fixed; None where the planner chooses.

    documents: cumulative offsets (0, ..., sequence) of the documents in a row where every row has
    the same; None where rows hold documents of any lengths, and the costliest are foretold.
    tiers: below the device, on which states may rest, the preferred ones first; the hardware of a
    forecast has a tier of the same name with measured rates for each.
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
    sequence_chunk: int | None = None
    tiers: tuple[TierSpec, ...] = ()
    order: Literal["microbatch", "layer"] | None = None


Makers = tuple[Callable[[Plan, Ledger], Job], Callable[[int], object]]


def layouts(wish: Wish) -> tuple[tuple[int, ...], ...]:
    """The documents of a row to rehearse: one of these layouts holds the most of all.

    A document of a length that kernels like needs no copies, one beside it does; scores that are
    made explicitly (windows, caps) are most for the longest document.
    """
    if wish.documents is not None:
        return (wish.documents,)
    whole = (0, wish.sequence)
    return ((0, 1, wish.sequence), whole) if wish.sequence > 1 else (whole,)


def native_makers(
    config: DecoderConfig, wish: Wish, documents: tuple[int, ...] | None = None
) -> Makers:
    """How a rehearsal makes a native decoder's job, and a batch of whole rows.

    documents: of every row; by default the first of `layouts`.
    """
    bounds = documents or layouts(wish)[0]

    def job_of(plan: Plan, ledger: Ledger) -> Job:
        flow = NativeFlow(Decoder(config), plan)
        stores = nowhere(plan)
        return Job(flow, plan, wish.optimizer, clip=wish.clip, ledger=ledger, stores=stores)

    def batch_of(rows: int) -> Batch:
        ids = torch.zeros(rows, wish.sequence, dtype=torch.int64)
        return Batch(ids, torch.zeros_like(ids), (bounds,) * rows)

    return job_of, batch_of


def facts_of_model(config: DecoderConfig, wish: Wish) -> Facts:
    """What the placement of plans needs of a native decoder."""
    segments = len(config.layers) + 2
    stages = per_segment(segments)
    plan = Plan(segments, stages, precision=wish.precision, approximate=wish.approximate)
    with FakeTensorMode():
        facts = facts_of(Job(NativeFlow(Decoder(config), plan), plan, wish.optimizer))
    return replace(facts, host=memories(wish))


def memories(wish: Wish) -> frozenset[str]:
    """The tiers that are memory, where parts can be updated as they rest."""
    return frozenset(tier.name for tier in wish.tiers if tier.medium == "memory")


@dataclass
class Oracle:
    """Forecasts of a native decoder's plans. Plans that differ only in where states rest and in how
    many layers are computed how share what was rehearsed."""

    config: DecoderConfig
    wish: Wish
    hardware: Hardware
    facts: Facts
    _known: dict[tuple[object, ...], Costs] = field(default_factory=dict)

    def costs(self, plan: Plan) -> list[Costs]:
        """Costs of a plan's actions, for each of the wish's `layouts`."""
        chosen = sample(self.config, plan)
        return [
            expand(self._rehearsed(chosen, bounds), chosen, plan, self.facts)
            for bounds in layouts(self.wish)
        ]

    def forecast(self, plan: Plan) -> Forecast:
        """With the costliest of the layouts."""
        made = (compose(plan, costs, self.hardware) for costs in self.costs(plan))
        return max(made, key=lambda one: one.peak)

    def _rehearsed(self, chosen: Sample, bounds: tuple[int, ...]) -> Costs:
        key = (bare(chosen.plan), chosen.config.layers, bounds)
        if key not in self._known:
            makers = native_makers(chosen.config, self.wish, bounds)
            self._known[key] = rehearse(chosen.plan, *makers)
        return self._known[key]
