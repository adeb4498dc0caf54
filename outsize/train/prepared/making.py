"""How `prepare` makes a job for the first batch: it meets the other workers, sees what they can cut
of the model, asks the planner, opens the tiers."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outsize import accelerator
from outsize.collectives import Lone, World, along
from outsize.collectives.joined import from_environment
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.errors import OutsizeError, counted
from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.memory import Meter, format_bytes, meter
from outsize.memory.store import Store
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer, taker
from outsize.parallel.automatic.derive import Derived
from outsize.plan import Plan, Precision
from outsize.plan.plan import BYTES
from outsize.plan.settings import NONE, PLAN_SETTINGS
from outsize.runtime import Job
from outsize.runtime.adopted.flow import reach_of
from outsize.runtime.adopted.reach import Reach
from outsize.runtime.checks import Retrained
from outsize.runtime.making import AdoptedModel, NativeModel, Trainable, make_job
from outsize.runtime.recipe import Here
from outsize.search import PlanRequest, chosen, pick
from outsize.search.candidates import candidates
from outsize.search.pipeline_cuts import composed
from outsize.search.request import memories
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs, Facts
from outsize.simulate.nowhere import nowhere
from outsize.simulate.rehearse import bare, rehearse, splits_of
from outsize.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    tree_flatten,
)
from outsize.train.prepared import chunkable
from outsize.train.prepared.batches import cut, empty_like, own_loss, rows_in
from outsize.train.prepared.module import derived_of, said, unpacked
from outsize.train.prepared.optimizers import Handed
from outsize.train.prepared.options import Settings
from outsize.train.prepared.workers import agreed, alike, balanced, begin_alike, draw_alike, meet
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
        world = from_environment(mesh, os.environ, self.device.type)
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
        axes = [a.name for a in self.settings.mesh.axes if a.cuts in ("stages", "tokens")]
        axes = ["tensor", *axes] if self.derived else axes

        def met() -> None:
            for name in axes:
                meet(along(self.world, name), name, batch, self.device)
            if self.derived:
                draw_alike(along(self.world, "tensor"), self.device)

        if axes:
            self.alike(met)

    def make(self, batch: Any) -> Job:
        """The job for batches like this one; the workers have met."""
        settings = self.settings
        self.alike(lambda: self._look(batch))
        plan, below = self._planned(batch)
        own, limit = self.model.parameters(), settings.budget
        kept = accelerator.reserved(self.device)
        ledger = None if limit is None else meter(self.device, limit, own, kept)
        with ExitStack() as stack:
            stores = self.alike(
                lambda: stack.enter_context(
                    opened(settings.tiers, plan, below, self.device, warnings.warn)
                )
            )
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
        request = replace(
            settings.request(self.handed.update, batch),
            apart=accelerator.queues(self.device),
            kind=self.device.type,
            grain=accelerator.grain(self.device),
        )
        segments = 2 + len(model.blocks if isinstance(model, Decoder) else settings.blocks)
        given = self.alike(lambda: settings.given_plan(request, segments))
        plan = given or next(candidates(request, segments))

        def rehearsed(plan: Plan) -> Costs:
            fake = (self._fake_job, partial(empty_like, batch))
            with unpacked(batch):
                return rehearse(plan, *fake, ledger_of=request.ledger)

        open_ = given is None and request.searched and request.mesh.pipeline > 1
        if not open_:
            line = balanced(plan, rehearsed, self.world, self.device)
            plan, request = replace(plan, pipeline=line), replace(request, pipeline=line)
        if settings.budget is None and given is None and not open_:
            return plan, {}

        hardware = self.alike(lambda: with_tiers(probe(self.device.type), settings.tiers))
        forecaster = Rehearsals(request, hardware, rehearsed)

        def fit() -> Forecast:
            if given is not None:
                return pick([[plan]], forecaster.forecast, settings.budget)
            forecaster.costs(plan)
            try:
                return chosen(forecaster, segments)
            except OutsizeError:
                chunked = self._chunked(request, batch)
                if chunked is None:
                    raise
                return chosen(forecaster.asking(chunked), segments)

        def found() -> Forecast:
            return pick([[first]], forecaster.forecast, settings.budget)

        # The first worker searches, with its own rates; the others see that what it found fits.
        first = self.alike(lambda: self._predictable(fit).plan if not self.world.rank else plan)
        first = agreed(first, self.world, self.device)
        self.forecast = self.alike(lambda: self._predictable(found))
        return first, dict(self.forecast.below)

    def _chunked(self, request: PlanRequest, batch: Any) -> PlanRequest | None:
        """A request that may have the module in chunks of the sequence, None where it does not run
        like that."""
        own, said = self.settings, self.settings.said
        free = {name: chunkable.CHUNK for name, one in PLAN_SETTINGS.items()
                if one.tokens and own.settings.get(name) is None}  # fmt: skip
        again = own.recompute in (None, ("block",))
        open_ = own.blocks and free and again and not own.parted
        if isinstance(self.model, Decoder) or not open_:
            return None
        tried = partial(
            chunkable.runs, self.model, own.blocks, batch, own.loss or own_loss, NONE.having(free)
        )
        heads = said["loss_chunk"] is None and tried(heads=True)
        if not heads and not tried(heads=False):
            return None
        tokens = chunkable.tokens_of(batch)
        return replace(request, tokens=tokens, loss_chunk=None if heads else request.loss_chunk)

    def _predictable(self, fit: Callable[[], Forecast]) -> Forecast:
        try:
            return fit()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise OutsizeError(
                f"{type(self.model).__name__} cannot be predicted: its forward depends on values"
                f" ({error}); leave memory out, or give it a forward that depends on shapes alone"
            ) from None

    # -- the job ----------------------------------------------------------------------------------

    def _fake_job(self, plan: Plan, ledger: Meter) -> Job:
        """The same job over a copy of the model that has no memory. Called in a fake mode."""
        twin, blocks = twin_of(self.model, self.settings.blocks)
        world = PretendWorld(plan.mesh, plan.mesh.size - 1)
        stores = nowhere(plan, memories(self.settings.tiers))
        return self._job_of(twin, blocks, plan, ledger, stores, world)

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
            return NativeModel(model, own.added, own.by_target)
        count = own.count
        counter = None if count is None else lambda batch: torch.tensor(float(count(batch)))
        return AdoptedModel(
            model, blocks, own.loss or own_loss, cut if own.microbatches > 1 else None, counter,
            self.reach, self.derived,
        )  # fmt: skip


@dataclass
class Rehearsals:
    """Forecasts of one module's plans; those that differ only in where states rest share one
    rehearsal. rehearsed: one, of a plan with every state on the device."""

    request: PlanRequest
    hardware: Hardware
    rehearsed: Callable[[Plan], Costs]
    _known: dict[tuple[Plan, tuple[bool, ...]], Costs] = field(default_factory=dict)
    _facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        assert self._facts is not None, "a plan is rehearsed before anything else is asked"
        return self._facts

    def asking(self, request: PlanRequest) -> Rehearsals:
        """The same of another schedule."""
        return replace(self, request=request)

    def costs(self, plan: Plan) -> list[Costs]:
        """Costs of a plan's actions: a list of one."""
        key = bare(plan), splits_of(plan)
        if key not in self._known:
            made = self.rehearsed(plan)
            host = memories(self.request.tiers)
            self._facts = replace(made.facts, host=host, grain=self.request.grain)
            self._known[key] = replace(made, facts=self._facts)
        return [self._known[key]]

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan holds and takes."""
        return composed(plan, self.costs(plan), self.hardware)


def twin_of(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    device: torch.device | None = None,
) -> tuple[nn.Module, list[tuple[str, nn.Module]]]:
    """A copy of a model whose tensors are made anew, empty, in the mode that is on. device: where,
    instead of where they are."""
    known: dict[int, Any] = {}
    for p in model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype, device=device or p.device)
        known[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    # Tensors that a module has besides, as attributes, cannot be copied where there is no memory.
    beside = (leaf for m in model.modules() for leaf in tree_flatten(_beside(m))[0])
    for b in chain(model.buffers(), (leaf for leaf in beside if isinstance(leaf, Tensor))):
        if id(b) not in known:
            known[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=device or b.device)
    try:
        twin = copy.deepcopy(model, known)
    except (RuntimeError, TypeError) as error:
        raise OutsizeError(
            f"{type(model).__name__} cannot be predicted: a copy of it fails"
            f" ({str(error).splitlines()[0]}); leave memory out, or make tensors among its"
            " attributes buffers, and take out what is no data"
        ) from error
    return twin, [(path, twin.get_submodule(path)) for path, _ in blocks]


def _beside(module: nn.Module) -> list[Any]:
    """What a module has that is no parameter, buffer or module."""
    registered = ("_parameters", "_buffers", "_modules")
    return [value for name, value in vars(module).items() if name not in registered]


def _state_bytes(optimizer: Optimizer, sizes: Precision) -> int:
    """The least that an optimizer keeps of a parameter; states of less than one element for each
    are not counted."""
    own = BYTES[sizes.optimizer]
    return sum(s.dtype.itemsize if s.dtype else own for s in optimizer.states if s.shaped)


def refuse_small_budget(model: nn.Module, optimizer: Optimizer, settings: Settings) -> None:
    """What is always there must fit, whatever the batch will be."""
    budget = settings.budget
    if budget is None:
        return
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    sizes = settings.precision
    each = BYTES[sizes.compute] + BYTES[sizes.gradients]
    each += BYTES[sizes.master] if sizes.master else 0
    each += min(_state_bytes(taker(optimizer, main), sizes) for main in (False, True))
    static = trained * each + frozen * BYTES[sizes.compute]
    if static > budget:
        raise OutsizeError(
            f"memory budget of {format_bytes(budget)} ({budget} bytes) is too small:"
            f" parameters, gradients and optimizer alone are {static} bytes,"
            f" {counted(static - budget, 'byte')} missing; set memory above"
            f" {-(-static // 2**20)}MiB"
        )
