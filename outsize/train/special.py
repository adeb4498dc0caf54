"""What names under `plan.approximate` make of a run: which job it has, and its plan.

"zeroth-order" and "local-learning" have jobs of their own, which are predicted by playing them on
fake tensors; "frozen-by-dynamics" plays the usual job's steps and is predicted without freezing,
which takes more, and with the weights that it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.kernels.entropy import PLAIN
from outsize.memory import Ledger
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.plan import DEVICE, Local, Plan, Rest, Stream
from outsize.runtime import Job
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.forwards import Zeroth
from outsize.runtime.special.freezing import Freezing
from outsize.runtime.special.local import LocalJob
from outsize.runtime.trains import Trains
from outsize.search import PlanRequest, pick
from outsize.search.candidates import candidates
from outsize.search.request import layouts
from outsize.simulate import Forecast
from outsize.simulate.playing import predict_local
from outsize.simulate.rehearse import Nowhere
from outsize.techniques.frozen_by_dynamics import KEY as FROZEN
from outsize.techniques.frozen_by_dynamics import FrozenByDynamics
from outsize.techniques.local_learning import KEY as LOCAL
from outsize.techniques.local_learning import LocalLearning
from outsize.techniques.zeroth_order import KEY as ZEROTH
from outsize.techniques.zeroth_order import ZerothOrder
from outsize.techniques.zeroth_order import predicted as predict_zeroth
from outsize.train.config import RunConfig

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
            raise OutsizeError(f"{FROZEN}.share is {self.frozen:g}; expected less than 1")

    @property
    def plans(self) -> bool:
        """Whether its plan is chosen and predicted here."""
        return bool(self.names & {ZEROTH, LOCAL})

    @property
    def share(self) -> float | None:
        """Of the layers, those that each step leaves alone; None where all are trained."""
        return self.frozen if FROZEN in self.names else None

    # -- the job ----------------------------------------------------------------------------------

    def job(self, model: NativeModel, plan: Plan, recipe: Recipe, here: Here) -> Trains:
        """The job that carries a plan out."""
        decoder, ledger, fill = model.model, here.ledger, model.fill
        if ZEROTH in self.names:
            if model.options != PLAIN:
                raise OutsizeError(
                    "zeroth-order: train.label_smoothing and train.z_loss change gradients, and"
                    " there are none; set both to 0"
                )
            return make_job(model, plan, Recipe(self.zeroth), here)
        if LOCAL in self.names:
            return LocalJob(
                decoder, plan, recipe.optimizer, recipe.clip, ledger, fill, model.options
            )
        return make_job(model, plan, recipe, here)

    def stepping(
        self, job: Trains, distances: Mapping[str, float]
    ) -> tuple[Step, Callable[[], Notes]]:
        """How the run makes a step, and what of it a checkpoint keeps. distances: of layers, where
        it goes on."""
        if FROZEN not in self.names:
            return job.step, dict
        assert isinstance(job, Job)
        freezing = Freezing(job, self.frozen, self.seed, distances, self.keep)
        return freezing.step, lambda: {FREEZING: dict(freezing.distances)}

    # -- the plan ---------------------------------------------------------------------------------

    def choose(self, config: DecoderConfig, request: PlanRequest, hardware: Hardware) -> Forecast:
        """The quickest plan that fits request.budget; weights of zeroth-order runs may rest
        below."""

        def predicted(plan: Plan) -> Forecast:
            return self.predict(config, request, plan, hardware)

        plans = list(self._plans(config, request))
        if not request.tiers or request.budget is None or LOCAL in self.names:
            return pick(iter(plans), predicted, request.budget)
        try:
            return pick(iter(plans[:1]), predicted, request.budget)
        except OutsizeError:
            below = [_below(plan, request, count) for plan in plans for count in _counts(plan)]
            return pick(iter(below), predicted, request.budget)

    def predict(
        self, config: DecoderConfig, request: PlanRequest, plan: Plan, hardware: Hardware
    ) -> Forecast:
        """The forecast of a plan, with the costliest layout of documents."""
        made = (self._predict(config, request, plan, hardware, one) for one in layouts(request))
        return max(made, key=lambda one: one.peak)

    def _plans(self, config: DecoderConfig, request: PlanRequest) -> Iterator[Plan]:
        """Candidates, quickest first."""
        bare = replace(request, approximate=(), settings=request.settings.closed)
        if ZEROTH in self.names:
            bare = replace(bare, recompute=request.recompute or ())
        for plan in candidates(bare, len(config.layers) + 2):
            yield replace(plan, approximate=request.approximate, local=self.local)

    def _predict(
        self,
        config: DecoderConfig,
        request: PlanRequest,
        plan: Plan,
        hardware: Hardware,
        bounds: tuple[int, ...],
    ) -> Forecast:
        def batch_of(rows: int) -> Batch:
            return request.batch(rows, bounds)

        if ZEROTH in self.names:

            def zeroth(plan: Plan, ledger: Ledger) -> Job:
                here = Here(ledger=ledger, stores=dict.fromkeys(_tiers(plan), Nowhere()))
                return make_job(NativeModel(Decoder(config)), plan, Recipe(self.zeroth), here)

            return predict_zeroth(plan, zeroth, batch_of, hardware, request.filling)

        def local(plan: Plan, ledger: Ledger) -> LocalJob:
            return LocalJob(Decoder(config), plan, request.optimizer, request.clip, ledger)

        return predict_local(plan, local, batch_of, hardware, request.filling)


def special_of(config: RunConfig) -> Special:
    """The approximations of a run whose learning rate is known."""
    own, optimizer = config.plan, config.optimizer
    assert optimizer.lr is not None
    seed = config.train.seed
    for key in (ZEROTH, LOCAL, FROZEN):
        if config.technique(key) is not None and key not in own.approximate:
            raise OutsizeError(
                f"{key} is set, and plan.approximate is {list(own.approximate)}: it changes the"
                f" maths; name {key} there, or leave its settings out"
            )
    zeroth = config.technique(ZEROTH) or ZerothOrder()
    local = config.technique(LOCAL) or LocalLearning()
    frozen = config.technique(FROZEN) or FrozenByDynamics()
    return Special(
        frozenset(own.approximate),
        Zeroth(optimizer.lr, zeroth.epsilon, optimizer.weight_decay, seed),
        Local(local.groups, local.auxiliary, local.momentum),
        frozen.share,
        frozen.keep,
        seed,
    )


def _tiers(plan: Plan) -> set[str]:
    return {stage.rest.parameters for stage in plan.stages} - {DEVICE}


def _counts(plan: Plan) -> list[int]:
    """How many blocks' weights rest below: some, more, then all and the ends."""
    blocks = len(plan.stages) - 2
    graded = {-(-blocks * quarter // 4) for quarter in range(1, 5)}
    return [*sorted(n for n in graded if n > 1), len(plan.stages)]


def _below(plan: Plan, request: PlanRequest, count: int) -> Plan:
    """The plan with weights of the last so many blocks, or of all stages, on the first tier."""
    last = len(plan.stages) - 1
    tier = request.tiers[0].name
    first = 0 if count > last else last - count
    stages = tuple(
        replace(s, rest=Rest(tier)) if count > last or first <= i < last else s
        for i, s in enumerate(plan.stages)
    )
    return replace(plan, stages=stages, stream=Stream())
