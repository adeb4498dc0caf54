"""Prepared: somebody's own model under training, as `prepare` gives it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outsize.collectives import Lone, World, along
from outsize.collectives.joined import from_environment
from outsize.collectives.pretend import Pretend, PretendWorld
from outsize.decode.generate import GREEDY
from outsize.decode.samplers import Sampler
from outsize.errors import OutsizeError
from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.memory import Meter, meter
from outsize.memory.store import Store
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.parallel.automatic import Derived
from outsize.plan import DEVICE, Plan
from outsize.runtime import Job, Report
from outsize.runtime.adopted import reach_of
from outsize.runtime.generating import Generated
from outsize.runtime.making import AdoptedModel, Here, NativeModel, Recipe, Trainable, make_job
from outsize.runtime.reach import Reach, Uncut
from outsize.schedule.kept import PARAMETERS
from outsize.search import pick
from outsize.simulate import Forecast
from outsize.simulate.costs import Costs
from outsize.simulate.forecast import compose
from outsize.simulate.rehearse import nowhere, rehearse
from outsize.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    mark_stepped,
)
from outsize.train import kept
from outsize.train.adopting import (
    Guard,
    Neighbours,
    begin_alike,
    derived_of,
    said,
    without_caches,
)
from outsize.train.balancing import agreed, balanced
from outsize.train.batches import cut, empty_like, own_loss, refuse_empty, tokens_of
from outsize.train.candidates import Settings, plans_of, refuse_small_budget, rows_in
from outsize.train.optimizers import converted, group_of, groups_now
from outsize.train.predicting import choose_tiered, request_of
from outsize.train.tiers import opened, with_tiers
from outsize.train.twin import twin_of

_BELOW = (
    "its weights rest on tiers, so its own forward would compute with others; call"
    " job.evaluate(batch), or read job.weights()"
)
_PARTS = (
    "its parameters are this worker's parts, so its own forward and state_dict would give others;"
    " call job.evaluate(batch), or read job.weights(), before job.close()"
)


class Prepared:
    """A model under training. `step` trains on a batch; `report` tells of the last step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer | str,
        settings: Settings,
    ) -> None:
        self.model, self.settings = model, settings
        self._torch = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._optimizer = converted(optimizer)
        self._group_of = None if self._torch is None else group_of(model, self._torch)
        self._job: Job | None = None
        self.forecast: Forecast | None = None
        self._stack = ExitStack()  # of the stores, while there is a job
        self._guard = Guard(model)
        self._stack.callback(without_caches(model))
        self._world: World = Lone()
        self._derived: dict[str, Derived] = {}  # what of an adopted module the tensor axis cuts
        self._reach: Reach | None = None  # of an adopted module on a pipeline
        self._like: Callable[[int], Any] | None = None  # batches of so many rows, without values
        self._closed = False
        self._steps = torch.zeros(())
        self._hook: RemovableHandle | None = None
        self._pending: Callable[[Job], int] | None = None  # states for the job to come
        if self._torch is not None and self._torch.state:
            self._pending = partial(kept.taken, optimizer=self._torch)
        if not settings.tiers and settings.mesh.size == 1:
            refuse_small_budget(model, self._optimizer, settings)

    @property
    def plan(self) -> Plan:
        """The plan, once a first step has been made."""
        return self._made.plan

    @property
    def report(self) -> Report:
        """Loss, norm, seconds and trace of the last step."""
        return self._made.report

    @property
    def spread(self) -> str:
        """One line: how much of an adopted module the tensor axis cuts, and what is whole for which
        reason; empty where the axis has one worker. After a first step."""
        return said(self._sizes, self._derived) if self._derived else ""

    @property
    def _made(self) -> Job:
        if self._job is None:
            raise OutsizeError(
                "job has no plan yet: it is made for the first batch; call step first"
            )
        return self._job

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Train on one batch; gives the mean loss, a scalar tensor.

        A native decoder takes token ids (B, S), a mapping with input_ids, labels and weights (of
        the labels; what each one's loss is times), or a Batch; an adopted module what its forward
        takes: a mapping by keyword, a tuple by place.
        """
        if isinstance(self.model, Decoder):
            batch = tokens_of(batch, self.model.config.vocab)
        refuse_empty(batch)
        if self._job is None and self.settings.whole:
            return self._first(batch, lr)
        return self._stepped(batch, lr)

    def _first(self, batch: Any, lr: float | None) -> Tensor:
        """The first step: blocks that were found and are not called once each, in order, are no
        blocks, and the module is computed whole."""
        before = torch.get_rng_state()
        try:
            return self._stepped(batch, lr)
        except Uncut:
            if self._job is not None:
                self._job.close()
                self._job = None
            torch.set_rng_state(before)
            self.settings = replace(self.settings, blocks=())
            return self._stepped(batch, lr)

    def _stepped(self, batch: Any, lr: float | None) -> Tensor:
        if self._job is None:
            self._job = self._make(batch)
        self._meet(batch)
        if self._torch is not None:
            self._job.updates.groups = groups_now(self._torch)
            mark_stepped(self._torch)
            lr = 1.0
        with self._computing():
            loss = self._job.step(batch, lr)
        self._steps += 1
        if self._torch is not None:
            self._show(self._torch, self._job)
        return loss

    def _show(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        """The optimizer that was handed in has its states: as they are here, where they lie whole
        on the device; else when its state_dict is asked for."""
        if self._hook is None:
            if not (self.settings.tiers or self.settings.mesh.size > 1):
                kept.shown(job, optimizer, self._steps)
            self._hook = optimizer.register_state_dict_pre_hook(self._show_all)

    def _show_all(self, optimizer: torch.optim.Optimizer) -> None:
        if self._job is not None:
            kept.shown(self._job, optimizer, self._steps)

    def evaluate(self, batch: Any) -> tuple[float, float]:
        """Sum of losses over a batch and what to divide it by, wherever the weights rest; after a
        first step."""
        if isinstance(self.model, Decoder):
            batch = tokens_of(batch, self.model.config.vocab)
        refuse_empty(batch)
        job = self._made
        self._meet(batch)
        with self._computing():
            return job.evaluate(batch, rows_in(batch))

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_tokens: int,
        sampling: Sampler | Sequence[Sampler] = GREEDY,
        stop: Collection[int] = (),
        logprobs: bool = False,
    ) -> list[Generated]:
        """What follows each of the prompts, ids of tokens, with the weights as they are, wherever
        they rest; see Job.generate. Of a native decoder, after a first step."""
        job = self._made
        with self._computing():
            return job.generate(prompts, max_tokens, sampling, stop, logprobs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name; of what rests below or on other workers, a copy of one chunk at
        a time: use each before the next. The workers of a pipeline read together, to the end. After
        a first step."""
        return self._made.weights()

    def state_dict(self) -> dict[str, Any]:
        """Copies of weights, optimizer states, counts of updates and buffers, by name. After a
        first step; the workers of a pipeline or a tensor axis call it together."""
        return kept.state_dict(self._made, self.model, int(self._steps))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, of a job of the same model and optimizer, whatever its
        plan was; before the first step too. OutsizeError, naming the tensor, for another's."""
        self._take(lambda job: kept.load_state_dict(job, self.model, state))

    def save(self, path: str | Path) -> Path:
        """Write all states below `path`, as the checkpoint of the steps made so far; gives its
        directory. The directory of a native decoder is one for outsize.load too."""
        return kept.save(self._made, self.model, int(self._steps), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from the last checkpoint that `save` wrote below `path`, as `load_state_dict`."""
        self._take(lambda job: kept.load(job, self.model, Path(path)))

    def _take(self, states: Callable[[Job], int]) -> None:
        if self._job is None:
            self._pending = states
        else:
            self._steps.fill_(states(self._job))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._guard.ours = True
        try:
            yield
        finally:
            self._guard.ours = False

    def _meet(self, batch: Any) -> None:
        device, mesh = self._device(), self.settings.mesh
        if self._derived:
            neighbours = Neighbours(along(self._world, "tensor"), "tensor")
            neighbours.meet(batch, device)
            neighbours.draw_alike(device)
        for axis in mesh.axes:
            if axis.cuts in ("stages", "tokens"):
                Neighbours(along(self._world, axis.name), axis.name).meet(batch, device)

    def close(self) -> None:
        """Give the model back as an ordinary module. Parameters that rested on tiers are NaN from
        then on: read `weights` before. So of what the tensor axis has cut and of stages on other
        workers, which are not all here: the module's own forward and state_dict stay refused."""
        try:
            if self._job is not None:
                self._job.close()
                _forget(self._job)
                self._job, self._closed = None, self.settings.parted
        finally:
            self._stack.close()

    def _join(self, batch: Any) -> None:
        """Meet the other workers: as many rows each, and the first one's weights."""
        mesh = self.settings.mesh
        if mesh.size == 1:
            return
        world = from_environment(mesh, os.environ, _backend(self._device()))
        self._world = world
        self._stack.callback(world.close)
        begin_alike(self.model, world, rows_in(batch), self._device())

    def _make(self, batch: Any) -> Job:
        settings = self.settings
        if self._closed:
            raise OutsizeError(
                f"job is closed, and mesh is {settings.mesh}: the model's parameters are parts now;"
                " make the model anew and call outsize.prepare"
            )
        self._join(batch)
        self._derive(batch)
        self._reach = self._reached(batch)
        self._like = partial(empty_like, batch)
        plans = plans_of(self.model, self._optimizer, settings, batch)
        plans = balanced(plans, self._rehearsed, self._world, self._device())
        plan, below = plans[0], dict[str, int]()
        if settings.budget is not None or settings.plan is not None:
            self.forecast = self._fit(plans, with_tiers(probe(), settings.tiers))
            plan, below = self.forecast.plan, dict(self.forecast.below)
        ledger = None if settings.budget is None else meter(self._device(), settings.budget)
        with ExitStack() as stack:
            stores = stack.enter_context(opened(settings.tiers, plan, below))
            job = self._job_of(self.model, settings.blocks, plan, ledger, stores, self._world)
            if self._derived or settings.mesh.pipeline > 1:
                self._guard.forward(_PARTS)
                self._guard.state_dict(_PARTS)
            if any(stage.rest.parameters != DEVICE for stage in plan.stages):
                stack.callback(self._guard.forward(_BELOW).remove)
            self._stack.push(stack.pop_all())
        self._like = None
        if self._pending is not None:
            self._steps.fill_(self._pending(job))
            self._pending = None
        return job

    def _derive(self, batch: Any) -> None:
        """What the tensor axis cuts of somebody else's module."""
        if isinstance(self.model, Decoder) or self.settings.mesh.tensor == 1:
            return
        axis = along(self._world, "tensor")
        self._derived = derived_of(self.model, self.settings.blocks, batch, axis.size)
        self._sizes = {name: p.numel() for name, p in self.model.named_parameters()}

    def _reached(self, batch: Any) -> Reach | None:
        """What the code between the blocks of somebody else's module reads, for a pipeline."""
        own = self.settings
        if isinstance(self.model, Decoder) or own.mesh.pipeline == 1:
            return None
        part = cut(batch, 0, -(-rows_in(batch) // own.microbatches))
        return reach_of(self.model, own.blocks, own.loss or own_loss, part)

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _rehearsed(self, plan: Plan) -> Costs:
        assert self._like is not None
        return rehearse(plan, self._fake_job, self._like)

    def _fit(self, plans: Sequence[Plan], hardware: Hardware) -> Forecast:
        def predict(plan: Plan) -> Forecast:
            return compose(plan, self._rehearsed(plan), hardware)

        settings = self.settings
        try:
            if not settings.tiers or settings.plan is not None:
                return pick(iter(plans), predict, settings.budget)
            request = request_of(plans[0], self._optimizer, settings.clip)
            request = replace(request, tiers=settings.tiers)
            made = choose_tiered(plans, request, hardware, self._rehearsed)
            plan = agreed(made.plan, self._world, self._device())
            return made if plan == made.plan else predict(plan)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise OutsizeError(
                f"{type(self.model).__name__} cannot be predicted: its forward depends on values"
                f" ({error}); leave memory out, or give it a forward that depends on shapes alone"
            ) from None

    def _fake_job(self, plan: Plan, ledger: Meter) -> Job:
        """The same job over a copy of the model that has no memory. Called in a fake mode."""
        twin, blocks = twin_of(self.model, self.settings.blocks)
        world = PretendWorld(plan.mesh, plan.mesh.size - 1)
        return self._job_of(twin, blocks, plan, ledger, nowhere(plan), world)

    def _job_of(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        plan: Plan,
        ledger: Meter | None,
        stores: Mapping[str, Store],
        world: World,
    ) -> Job:
        groups, mesh = None if self._torch is None else groups_now(self._torch), self.settings.mesh
        line = None if plan.mesh == mesh else Pretend(mesh.pipeline, mesh.pipeline - 1)
        recipe = Recipe(self._optimizer, self.settings.clip, groups, self._group_of)
        here = Here(world, ledger, stores, line=line)
        return make_job(self._trainable(model, blocks), plan, recipe, here)

    def _trainable(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Trainable:
        own = self.settings
        if isinstance(model, Decoder):
            return NativeModel(model, loss=own.by_target)
        count = own.count
        counter = None if count is None else lambda batch: torch.tensor(float(count(batch)))
        return AdoptedModel(
            model, blocks, own.loss or own_loss, cut if own.microbatches > 1 else None, counter,
            self._reach, self._derived,
        )  # fmt: skip


def _backend(device: torch.device) -> Literal["gloo", "nccl"]:
    return "nccl" if device.type == "cuda" else "gloo"


def _forget(job: Job) -> None:
    """Parameters that rested below are views of a pool that holds something else."""
    for index, table in enumerate(job.placement.chunks.tables):
        for slot in table.slots if job.placement.chunks.tier(index, PARAMETERS) != DEVICE else ():
            parameter = job.owners[slot.name]
            lost = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = lost.expand(parameter.shape)
