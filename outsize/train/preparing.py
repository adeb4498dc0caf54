"""How `prepare` makes a job for the first batch: it meets the other workers, sees what they can cut
of the model, asks the planner, opens the tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from outsize.collectives import Lone, World, along
from outsize.collectives.joined import from_environment
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.errors import OutsizeError
from outsize.hardware.probe import probe
from outsize.memory import Meter, meter
from outsize.memory.store import Store
from outsize.models.decoder import Decoder
from outsize.parallel.automatic.derive import Derived
from outsize.plan import Plan
from outsize.runtime import Job
from outsize.runtime.adopted.flow import reach_of
from outsize.runtime.adopted.reach import Reach
from outsize.runtime.checks import Retrained
from outsize.runtime.making import AdoptedModel, NativeModel, Trainable, make_job
from outsize.runtime.recipe import Here
from outsize.search import PlanRequest, chosen, pick
from outsize.search.candidates import candidates
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs
from outsize.simulate.rehearse import nowhere, rehearse
from outsize.torch_private import DataDependentOutputException, DynamicOutputShapeException
from outsize.train.adopting import Neighbours, begin_alike, derived_of, said
from outsize.train.alike import agreed, alike, balanced
from outsize.train.batches import cut, empty_like, own_loss
from outsize.train.handed import Handed
from outsize.train.rehearsals import Rehearsals, twin_of
from outsize.train.settings import Settings, given_plan, request_of, rows_in, segments_of
from outsize.train.tiers import opened, with_tiers

T = TypeVar("T")
Blocks = Sequence[tuple[str, nn.Module]]


@dataclass
class Preparing:
    """A model on its way to a job, on one of its workers. stack: closes what is opened. derived:
    what of an adopted module the tensor axis cuts; reach: what the code between its blocks reads,
    on a pipeline. abort: ends the work of all workers, for a reason; see Joined."""

    model: nn.Module
    handed: Handed
    settings: Settings
    stack: ExitStack
    world: World = field(default_factory=Lone)
    forecast: Forecast | None = None
    derived: dict[str, Derived] = field(default_factory=dict)
    reach: Reach | None = None
    abort: Callable[[str], str] = str

    @property
    def device(self) -> torch.device:
        """Where the model's tensors are."""
        return next(self.model.parameters()).device

    @property
    def spread(self) -> str:
        """As Prepared has it."""
        return said(self._sizes, self.derived) if self.derived else ""

    def join(self) -> None:
        """Meet the other workers, where there are any and they have not met."""
        mesh = self.settings.mesh
        if mesh.size == self.world.mesh.size:
            return
        world = from_environment(mesh, os.environ, _backend(self.device))
        self.world, self.abort = world, world.abort
        self.stack.callback(self._leave, world.close)

    def _leave(self, close: Callable[[], None]) -> None:
        self.world = Lone()
        close()

    def alike(self, work: Callable[[], T]) -> T:
        """What `work` gives, or its refusal on one of the workers."""
        return alike(work, self.world, self.device)

    def meet(self, batch: Any) -> None:
        """See that neighbours who compute with the same rows have them, and draw alike."""
        axes = [axis for axis in self.settings.mesh.axes if axis.cuts in ("stages", "tokens")]
        if axes or self.derived:
            self.alike(lambda: self._meet(batch, [axis.name for axis in axes]))

    def _meet(self, batch: Any, axes: Sequence[str]) -> None:
        if self.derived:
            neighbours = Neighbours(along(self.world, "tensor"), "tensor")
            neighbours.meet(batch, self.device)
            neighbours.draw_alike(self.device)
        for name in axes:
            Neighbours(along(self.world, name), name).meet(batch, self.device)

    def make(self, batch: Any) -> Job:
        """The job for batches like this one; the workers have met."""
        settings = self.settings
        self.alike(lambda: self._look(batch))
        plan, below = self._planned(batch)
        ledger = None if settings.budget is None else meter(self.device, settings.budget)
        with ExitStack() as stack:
            stores = self.alike(lambda: stack.enter_context(opened(settings.tiers, plan, below)))
            job = self._job_of(self.model, settings.blocks, plan, ledger, stores, self.world)
            self.stack.push(stack.pop_all())
        return job

    def _look(self, batch: Any) -> None:
        """See that the workers begin alike; of somebody else's module, what they cut and what is
        read between its blocks."""
        own = self.settings
        if own.mesh.size > 1:
            begin_alike(self.model, self.world, rows_in(batch), self.device)
        if isinstance(self.model, Decoder):
            return
        if own.mesh.tensor > 1:
            self.derived = derived_of(self.model, own.blocks, batch, own.mesh.tensor)
            self._sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        if own.mesh.pipeline > 1:
            part = cut(batch, 0, -(-rows_in(batch) // own.microbatches))
            self.reach = reach_of(self.model, own.blocks, own.loss or own_loss, part)

    def outdated(self, job: Job) -> bool:
        """Whether other parameters are trained than a job was made for, so that it must be made
        anew. OutsizeError where its states lie on tiers or on several workers, which it may not."""
        try:
            self.alike(job.method.check)
        except Retrained:
            if self.settings.mesh.size > 1 or self.settings.tiers:
                raise
            return True
        return False

    # -- the plan ---------------------------------------------------------------------------------

    def _planned(self, batch: Any) -> tuple[Plan, Mapping[str, int]]:
        """The plan, and the bytes that it has below the device, by tier."""
        model, settings = self.model, self.settings
        request = request_of(model, self.handed.update, settings, batch)
        segments = segments_of(model, settings)
        given = self.alike(lambda: given_plan(model, settings, batch))
        plan = given or next(candidates(request, segments))
        rehearsed = partial(self._rehearsed, like=partial(empty_like, batch))
        line = balanced(plan, rehearsed, self.world, self.device)
        plan, request = replace(plan, pipeline=line), replace(request, pipeline=line)
        if settings.budget is None and given is None:
            return plan, {}

        def fit() -> Forecast:
            hardware = with_tiers(probe(), settings.tiers)
            forecaster = Rehearsals(request, hardware, rehearsed)
            if given is not None:
                return pick(iter([plan]), forecaster.forecast, settings.budget)
            forecaster.costs(plan)
            return chosen(forecaster, segments)

        self.forecast = self.alike(lambda: self._predictable(fit))
        first = agreed(self.forecast.plan, self.world, self.device)
        if first != self.forecast.plan:
            self.forecast = self._first_workers(first, request, rehearsed)
        return first, dict(self.forecast.below)

    def _first_workers(
        self, plan: Plan, request: PlanRequest, rehearsed: Callable[[Plan], Costs]
    ) -> Forecast:
        """The forecast of a plan that the first worker has found with other rates."""
        hardware = with_tiers(probe(), self.settings.tiers)
        return Rehearsals(request, hardware, rehearsed).forecast(plan)

    def _predictable(self, fit: Callable[[], Forecast]) -> Forecast:
        try:
            return fit()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise OutsizeError(
                f"{type(self.model).__name__} cannot be predicted: its forward depends on values"
                f" ({error}); leave memory out, or give it a forward that depends on shapes alone"
            ) from None

    def _rehearsed(self, plan: Plan, like: Callable[[int], Any]) -> Costs:
        """like: batches of so many rows, without values."""
        return rehearse(plan, self._fake_job, like)

    # -- the job ----------------------------------------------------------------------------------

    def _fake_job(self, plan: Plan, ledger: Meter) -> Job:
        """The same job over a copy of the model that has no memory. Called in a fake mode."""
        twin, blocks = twin_of(self.model, self.settings.blocks)
        world = PretendWorld(plan.mesh, plan.mesh.size - 1)
        return self._job_of(twin, blocks, plan, ledger, nowhere(plan), world)

    def _job_of(
        self,
        model: nn.Module,
        blocks: Blocks,
        plan: Plan,
        ledger: Meter | None,
        stores: Mapping[str, Store],
        world: World,
    ) -> Job:
        mesh = self.settings.mesh
        line = None if plan.mesh == mesh else Pretend(mesh.pipeline, mesh.pipeline - 1)
        here = Here(world, ledger, stores, line=line)
        recipe = self.handed.recipe(self.settings.clip)
        return make_job(self._trainable(model, blocks), plan, recipe, here)

    def _trainable(self, model: nn.Module, blocks: Blocks) -> Trainable:
        own = self.settings
        if isinstance(model, Decoder):
            return NativeModel(model, loss=own.by_target)
        count = own.count
        counter = None if count is None else lambda batch: torch.tensor(float(count(batch)))
        return AdoptedModel(
            model, blocks, own.loss or own_loss, cut if own.microbatches > 1 else None, counter,
            self.reach, self.derived,
        )  # fmt: skip


def _backend(device: torch.device) -> Literal["gloo", "nccl"]:
    return "nccl" if device.type == "cuda" else "gloo"
