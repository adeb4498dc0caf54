"""What names under `plan.approximate` make of a run: which job it has, and its plan.

"zeroth-order" and "local-learning" have jobs of their own, which are foretold by playing them on
fake tensors; "frozen-by-dynamics" plays the usual job's steps and is foretold without freezing,
which holds and takes more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outsize.collectives import Lone, World
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.kernels.entropy import PLAIN, LossOptions
from outsize.memory import Ledger, Meter
from outsize.memory.store import Store
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.parallel.divide import divide
from outsize.parallel.overlap import overlap_of
from outsize.plan import DEVICE, Local, Plan, Rest, Stream
from outsize.runtime import Job, NativeFlow
from outsize.runtime.forwards import Zeroth
from outsize.runtime.freezing import Freezing
from outsize.runtime.job import Fill
from outsize.runtime.local import LocalJob
from outsize.runtime.zeroth import ZerothJob
from outsize.search import Wish, pick
from outsize.search.candidates import candidates
from outsize.search.wish import layouts
from outsize.simulate import Forecast
from outsize.simulate.playing import foretell_local, foretell_zeroth
from outsize.simulate.rehearse import Nowhere
from outsize.train.config import RunConfig

AnyJob = Job | ZerothJob | LocalJob
ZEROTH, LOCAL, FROZEN = "zeroth-order", "local-learning", "frozen-by-dynamics"
Step = Callable[[Batch, float], Tensor]
Notes = dict[str, dict[str, float]]  # what a checkpoint says besides tensors
FREEZING = "freezing"  # there: how far every layer moved last


@dataclass(frozen=True)
class Special:
    """A run's approximations and their settings."""

    names: frozenset[str]
    zeroth: Zeroth
    local: Local
    frozen: float
    keep: Literal["whole", "int8"]
    seed: int

    def __post_init__(self) -> None:
        if FROZEN in self.names and not self.frozen < 1:
            raise OutsizeError(f"plan.frozen is {self.frozen:g}; expected less than 1")

    @property
    def plans(self) -> bool:
        """Whether its plan is chosen and foretold here."""
        return bool(self.names & {ZEROTH, LOCAL})

    # -- the job ----------------------------------------------------------------------------------

    def job(
        self,
        model: Decoder,
        plan: Plan,
        optimizer: Optimizer,
        clip: float | None,
        ledger: Meter | None,
        stores: Mapping[str, Store],
        fill: Fill | None = None,
        options: LossOptions = PLAIN,
        world: World | None = None,
        at: Callable[[str], None] | None = None,
    ) -> AnyJob:
        """The job that carries a plan out, in this worker of `world`. at: as a Job has it."""
        if ZEROTH in self.names:
            if options != PLAIN:
                raise OutsizeError(
                    "zeroth-order: train.label_smoothing and train.z_loss change gradients, and"
                    " there are none; set both to 0"
                )
            return ZerothJob(NativeFlow(model, plan), plan, self.zeroth, ledger, stores, fill)
        if LOCAL in self.names:
            return LocalJob(model, plan, optimizer, clip, ledger, fill, options)
        here = world or Lone()
        overlap = overlap_of(here, plan.overlap)
        cuts = divide(model, here, plan, overlap)
        return Job(
            NativeFlow(model, plan, options), plan, optimizer, clip=clip, ledger=ledger,
            stores=stores, fill=fill, world=world, cuts=cuts, at=at,
        )  # fmt: skip

    def stepping(
        self, job: AnyJob, distances: Mapping[str, float]
    ) -> tuple[Step, Callable[[], Notes]]:
        """How the run makes a step, and what of it a checkpoint keeps. distances: of layers, where
        it goes on."""
        if FROZEN not in self.names:
            return job.step, dict
        assert isinstance(job, Job)
        freezing = Freezing(job, self.frozen, self.seed, distances, self.keep)
        return freezing.step, lambda: {FREEZING: dict(freezing.distances)}

    # -- the plan ---------------------------------------------------------------------------------

    def choose(self, config: DecoderConfig, wish: Wish, hardware: Hardware) -> Forecast:
        """The quickest plan that fits wish.budget; weights of zeroth-order runs may rest below."""

        def foretold(plan: Plan) -> Forecast:
            return self.foretell(config, wish, plan, hardware)

        plans = list(self._plans(config, wish))
        if not wish.tiers or wish.budget is None or LOCAL in self.names:
            return pick(iter(plans), foretold, wish.budget)
        try:
            return pick(iter(plans[:1]), foretold, wish.budget)
        except OutsizeError:
            below = [_below(plan, wish, count) for plan in plans for count in _counts(plan)]
            return pick(iter(below), foretold, wish.budget)

    def foretell(
        self, config: DecoderConfig, wish: Wish, plan: Plan, hardware: Hardware
    ) -> Forecast:
        """The forecast of a plan, with the costliest layout of documents."""
        made = (self._foretell(config, wish, plan, hardware, one) for one in layouts(wish))
        return max(made, key=lambda one: one.peak)

    def _plans(self, config: DecoderConfig, wish: Wish) -> Iterator[Plan]:
        """Candidates, quickest first."""
        bare = replace(wish, approximate=(), sequence_chunk=wish.sequence_chunk or 0)
        if ZEROTH in self.names:
            bare = replace(bare, recompute=wish.recompute or ())
        for plan in candidates(bare, len(config.layers) + 2):
            yield replace(plan, approximate=wish.approximate, local=self.local)

    def _foretell(
        self,
        config: DecoderConfig,
        wish: Wish,
        plan: Plan,
        hardware: Hardware,
        bounds: tuple[int, ...],
    ) -> Forecast:
        def batch_of(rows: int) -> Batch:
            ids = torch.zeros(rows, wish.sequence, dtype=torch.int64)
            return Batch(ids, torch.zeros_like(ids), (bounds,) * rows, wish.noise())

        if ZEROTH in self.names:

            def zeroth(plan: Plan, ledger: Ledger) -> ZerothJob:
                flow, tiers = NativeFlow(Decoder(config), plan), _tiers(plan)
                return ZerothJob(flow, plan, self.zeroth, ledger, dict.fromkeys(tiers, Nowhere()))

            return foretell_zeroth(plan, zeroth, batch_of, hardware)

        def local(plan: Plan, ledger: Ledger) -> LocalJob:
            return LocalJob(Decoder(config), plan, wish.optimizer, wish.clip, ledger)

        return foretell_local(plan, local, batch_of, hardware)


def special_of(config: RunConfig) -> Special:
    """The approximations of a run whose learning rate is known."""
    own, optimizer = config.plan, config.optimizer
    assert optimizer.lr is not None
    seed = config.train.seed
    return Special(
        frozenset(own.approximate),
        Zeroth(optimizer.lr, own.epsilon, optimizer.weight_decay, seed),
        Local(own.local_groups),
        own.frozen,
        own.frozen_keep,
        seed,
    )


def _tiers(plan: Plan) -> set[str]:
    return {stage.rest.parameters for stage in plan.stages} - {DEVICE}


def _counts(plan: Plan) -> list[int]:
    """How many blocks' weights rest below: some, more, then all and the ends."""
    blocks = len(plan.stages) - 2
    graded = {-(-blocks * quarter // 4) for quarter in range(1, 5)}
    return [*sorted(n for n in graded if n > 1), len(plan.stages)]


def _below(plan: Plan, wish: Wish, count: int) -> Plan:
    """The plan with weights of the last so many blocks, or of all stages, on the first tier."""
    last = len(plan.stages) - 1
    tier = wish.tiers[0].name
    first = 0 if count > last else last - count
    stages = tuple(
        replace(s, rest=Rest(tier)) if count > last or first <= i < last else s
        for i, s in enumerate(plan.stages)
    )
    return replace(plan, stages=stages, stream=Stream())
