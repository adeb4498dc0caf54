"""Job: a model under training. One `step` plays the plan's schedule over one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outsize.collectives import Alone, Collective
from outsize.errors import OutsizeError, nearest
from outsize.memory import ChunkTable, Meter, tables
from outsize.memory.chunk import Dtypes
from outsize.memory.store import MemoryStore, Store
from outsize.optim import Optimizer
from outsize.plan import Plan, Precision
from outsize.runtime.again import recomputed, tiled
from outsize.runtime.flow import Flow, Walk
from outsize.runtime.gradients import Compute, Gradients
from outsize.runtime.lanes import Lanes
from outsize.runtime.placement import MASTER, PARAMETERS, Placement
from outsize.runtime.residence import NO_STORES, Residence
from outsize.runtime.spill import Entry, Spill, Spills, spilling
from outsize.runtime.turns import Turns
from outsize.runtime.update import Updates
from outsize.schedule import Action, Kind, Lane, Schedule, State, validate
from outsize.schedule.action import WHOLE
from outsize.schedule.residency import moved
from outsize.trace.trace import Event, Trace

Fill = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Group:
    """Parameters that share settings. lr: factor on the step's learning rate."""

    weight_decay: float
    lr: float = 1.0


@dataclass(frozen=True)
class Report:
    """What one step gave. loss: mean over valid targets; norm: of the whole gradient, before
    clipping; count: valid targets; trace: the actions as they ran."""

    loss: float
    norm: float
    count: int
    seconds: float
    trace: Trace


class Diverged(OutsizeError):
    """The gradient norm is not finite; the weights were left as they are."""


def dtypes_of(precision: Precision) -> Dtypes:
    """A plan's precision as torch dtypes."""
    master = precision.master
    return Dtypes(
        getattr(torch, precision.compute),
        getattr(torch, precision.gradients),
        None if master is None else getattr(torch, master),
        getattr(torch, precision.optimizer),
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, dataclasses included."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _check(flow: Flow, plan: Plan, clip: float | None) -> None:
    """Refuse what cannot be, before anything is allocated."""
    if "zeroth-order" in plan.approximate:
        raise OutsizeError(
            "plan: approximate holds zeroth-order, and this job computes gradients; use"
            " outsize.runtime.zeroth.ZerothJob, or leave the name out"
        )
    parts = {name for block in flow.blocks for name, _ in block.named_modules() if name}
    known = ("block", *(part for part in parts if "." not in part))
    for stage in plan.stages:
        for field, names in (("recompute", stage.recompute), ("spill", stage.spill)):
            for name in names:
                if name != "block" and name not in parts:
                    raise OutsizeError(
                        f"plan: {field} holds {name!r}, which is no part of any block"
                        f"{nearest(name, known)}"
                    )
    if plan.update == "behind" and clip is not None:
        raise OutsizeError(
            f"plan: update is 'behind' and gradients are clipped at {clip:g}: the norm is known"
            " only when every stage has its gradient; set clip to null, or update to 'apart'"
        )


def _by_shape(owners: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The usual groups: matrices, and everything else."""
    return {name: int(p.ndim < 2) for name, p in owners.items()}


def _placement(
    flow: Flow,
    plan: Plan,
    layout: tuple[ChunkTable, ...],
    optimizer: Optimizer,
    stores: Mapping[str, Store],
) -> Placement:
    uses = tuple(tuple(others) for others in flow.uses)
    memory = frozenset(n for n, store in stores.items() if isinstance(store, MemoryStore))
    whole = optimizer.layout == "matrix"
    return Placement(plan, layout, uses, dtypes_of(plan.precision), optimizer.states, whole, memory)


def start_of(schedule: Schedule) -> frozenset[str]:
    """What a schedule expects to find in the pool."""
    return frozenset() if schedule.residency is None else schedule.residency.start


class Job:
    """Holds the chunks of a model and plays schedules over them.

    flow: the model. plan: how a step runs. optimizer: the update. groups and group_of: settings by
    parameter name (matrices decay, vectors do not, where none are given). clip: largest gradient
    norm. ledger: counts bytes while the job works, and raises over its budget.
    collective: who else trains. stores: by name, the tiers below the device; the caller closes
    them. fill: writes the values of the parameter of a name into a tensor, for parameters that have
    no memory of their own (outsize/models/build.py, `shells`).
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        optimizer: Optimizer,
        groups: Sequence[Group] | None = None,
        group_of: Mapping[str, int] | None = None,
        clip: float | None = None,
        ledger: Meter | None = None,
        collective: Collective | None = None,
        stores: Mapping[str, Store] = NO_STORES,
        fill: Fill | None = None,
    ) -> None:
        self.flow, self.plan, self.optimizer, self.clip = flow, plan, optimizer, clip
        self.ledger, self.stores = ledger, stores
        self.collective: Collective = collective or Alone()
        named = [params for _, params in flow.segments]
        self.owners = {name: p for params in named for name, p in params}
        _check(flow, plan, clip)
        layout = tables(named, group_of or _by_shape(self.owners), flow.wide)
        self.placement = _placement(flow, plan, layout, optimizer, stores)
        if self.placement.first == len(plan.stages):
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        self.schedule = self.placement.schedule
        validate(self.schedule)
        device = next(iter(self.owners.values())).device
        self._spills = Spills(ledger)
        with self._watch():
            self.residence = Residence(self.placement, stores, device, self._account)
            self.chunks = self.residence.chunks
            self._adopt(fill)
        groups = groups or (Group(optimizer.weight_decay), Group(0.0))
        self.updates = Updates(self.residence, optimizer, groups)
        self.gradients = Gradients(self.chunks, self.owners)
        flow.attach(self.gradients)
        self._wrapped = list(self._wrap())
        self.follow(self.schedule)
        self._steps: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: lambda a: self._walks[a.microbatch].recompute(a.stage),
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.NORM: self._norm,
            Kind.UPDATE: self._update,
        }
        self._evaluations: dict[int, tuple[frozenset[str], Lanes]] = {}  # by their microbatches
        self._outdated = False  # the update at hand changes parameters that the pool holds still
        self._batch: Any = None
        self._torn = False  # some weights have had a step's update and some have not
        self._walks: dict[int, Walk] = {}
        self._weight_work: dict[tuple[int, int], list[tuple[Tensor, Compute]]] = {}
        self._missing: dict[tuple[int, int], list[Entry]] = {}

    # -- construction ---------------------------------------------------------------------------

    def _account(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.ledger is None else self.ledger.kind(kind)

    def _watch(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.ledger is None else self.ledger

    def _adopt(self, fill: Fill | None) -> None:
        """Move the parameters' values into chunks, one by one; the parameters become views."""
        residence = self.residence
        self._spills.kept = {residence.pool.untyped_storage()._cdata}
        views: dict[str, Tensor] = {}

        def take(name: str, out: Tensor) -> None:
            parameter = self.owners[name]
            if fill is None:
                out.copy_(parameter)
            else:
                fill(name, out)
            parameter.data = views[name]  # what it held before goes now

        for index in range(len(self.placement.tables)):
            chunk = residence.make(index)
            self._spills.kept.add(chunk.parameters.untyped_storage()._cdata)
            views |= {slot.name: slot.of(chunk.parameters) for slot in chunk.table.slots}
            self._replace(index, tuple(self._weights(index)), "", take)

    def _weights(self, index: int) -> Iterator[str]:
        """The states of a chunk that hold its weights."""
        return (w for w in (MASTER, PARAMETERS) if self.residence.has(index, w))

    def _wrap(self) -> Iterator[nn.Module]:
        """Give the parts that are computed again, tiled or spilled another forward."""
        blocks = self.flow.blocks
        for stage in self.plan.stages:
            for block in blocks[max(0, stage.first - 1) : max(0, stage.last - 1)]:
                for name, part in block.named_modules():
                    if self.plan.mlp_tile and name == "mlp":
                        part.forward = tiled(part, self.plan.mlp_tile)
                        yield part
                    elif name and name in stage.recompute:
                        part.forward = recomputed(part, self.flow.replay)
                        yield part
                    elif name and stage.spills and name in stage.spill:
                        part.forward = spilling(part, self._spills)
                        yield part

    def follow(self, schedule: Schedule) -> None:
        """Play a schedule from now on: one that `validate` has passed, over the same rooms."""
        self.schedule, self._turns = schedule, Turns(schedule, self.placement)
        self._lanes = Lanes(schedule, self.residence.device)

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters stay views of the chunks.

        Of what rests below the device, the parameters have the values that happen to be in the
        pool: read `weights` before.
        """
        for part in self._wrapped:
            del part.forward
        self.flow.attach(None)
        self.gradients.close()

    # -- one step -------------------------------------------------------------------------------

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Train on one batch; gives the mean loss over its valid targets, a scalar tensor.

        lr: this step's learning rate; the optimizer's own where none is given. `report` tells more.
        """
        begin = time.perf_counter()
        if self._torn:
            raise OutsizeError(
                "job: a step was cut off while it updated the weights; load a checkpoint to go on"
            )
        count = self.collective.sum(self.flow.count(batch)).item()
        if not count:
            raise OutsizeError("batch: no valid target in the whole step; expected one at least")
        self.ready(batch, count, lr)
        trace = self._play(begin)
        assert self._loss is not None
        loss: Tensor = self.collective.sum(self._loss)
        self.report = Report(
            float(loss), self._norm_value, int(count), time.perf_counter() - begin, trace
        )
        return loss

    def ready(self, batch: Any, count: float, lr: float | None = None) -> None:
        """Set out on a step: its batch, the one number that losses are divided by, its rate."""
        if self.ledger is not None:
            for tensor in _tensors(self._batch):  # the caller may keep it; the step does not
                self.ledger.release(tensor)
        self._batch, self._factor = batch, 1.0 / count
        self._lr = self.optimizer.lr if lr is None else lr
        self._loss: Tensor | None = None
        self._norm_value, self.updates.scale = 0.0, 1.0
        self._squares: dict[int, float] = {}
        if self.ledger is not None:
            with self.ledger.kind("data"):
                for tensor in _tensors(batch):
                    self.ledger.see(tensor)

    def _play(self, begin: float) -> Trace:
        self._updating = False
        try:
            with self._watch():
                self.residence.ensure(start_of(self.schedule))
                events = self._lanes.play(self, begin)
        except BaseException:
            self._torn = self._updating
            self._abandon()
            raise
        return Trace("measured", tuple(events))

    def alone(self, index: int, action: Action) -> Event:
        """One action of a step, in its turn, on the calling thread whatever its lane."""
        if action.lane is Lane.COMPUTE:
            return self.act(index, action, 0.0)
        self.prepare(index, action)
        event = self.move(index, action, 0.0)
        self.settle(index, action)
        return event

    def act(self, index: int, action: Action, begin: float) -> Event:
        """Run one computing action of a step that is under way; times count from `begin`."""
        ledger = self.ledger
        if ledger is not None:
            ledger.reset_peak()
        start = time.perf_counter()
        for stage in self._turns.anew.get(index, ()):
            self._zero(stage)
        self._outdated = index in self._turns.outdated
        self._steps[action.kind](action)
        for stage in self._turns.complete.get(index, ()):
            self._square(stage)
        end = time.perf_counter()
        live, peak = {}, 0
        if ledger is not None:
            ledger.settle()
            peak = ledger.peak
            live = {f"device/{kind}": count for kind, count in ledger.live.items() if count}
        return _event(action, start - begin, end - begin, live, peak)

    # -- other lanes ----------------------------------------------------------------------------

    def prepare(self, index: int, action: Action) -> None:
        """Make room for activations that come back."""
        if action.kind is Kind.FETCH and action.state is State.ACTIVATIONS:
            here = (action.stage, action.microbatch)
            with self._account("activations"):
                self._missing[here] = self._spills.of(*here).allocate()

    def move(self, index: int, action: Action, begin: float) -> Event:
        """Run an action of another lane."""
        start = time.perf_counter()
        if action.kind is Kind.UPDATE:
            self._updating = True
            self.updates.at_rest(action, self._lr, self.gradients.touched)
        elif action.state is State.ACTIVATIONS:
            self._move_activations(action)
        elif action.kind is Kind.FETCH:
            self.residence.fetch(moved(action))
        else:
            self.residence.evict(moved(action))
        return _event(action, start - begin, time.perf_counter() - begin, {}, 0)

    def _move_activations(self, action: Action) -> None:
        here = (action.stage, action.microbatch)
        if action.kind is Kind.FETCH:
            self._spills.of(*here).read(self._missing.pop(here))
        else:
            self._spills.of(*here).write()

    def settle(self, index: int, action: Action) -> None:
        """Let go of activations that have left."""
        if action.kind is Kind.EVICT and action.state is State.ACTIVATIONS:
            self._spills.of(action.stage, action.microbatch).release()

    # -- the computing actions ------------------------------------------------------------------

    def _abandon(self) -> None:
        """Forget a step that failed: no activation, no half-summed gradient remains."""
        self._walks.clear()
        self._weight_work.clear()
        self._spills.reset()
        self._missing.clear()
        self.gradients.reset()
        self.updates.reset()
        self.residence.forget()
        for chunk in self.chunks:
            if chunk.gradients is not None:
                chunk.gradients.zero_()

    def _forward(self, action: Action) -> None:
        m = action.microbatch
        if action.stage == 0:
            with self._account("data"):
                part = self.flow.part(self._batch, *self.plan.rows_of(m))
            self._walks[m] = self.flow.begin(part, self._factor, partial(self._spill_of, m))
        walk = self._walks[m]
        self._spill_of(m, action.stage)  # of a stage without blocks it stays empty
        walk.forward(action.stage)
        if action.stage == len(self.plan.stages) - 1:
            assert walk.loss is not None
            loss = walk.loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss

    def _spill_of(self, microbatch: int, stage: int) -> Spill | None:
        if (stage, microbatch) not in self._turns.spilled:
            return None
        here = self.plan.stages[stage]
        store = self.stores[here.rest.activations]
        return self._spills.begin(stage, microbatch, store, bool(here.spill))

    def _backward(self, action: Action) -> None:
        self._walks[action.microbatch].backward(action.stage)
        self._leave(action)

    def _leave(self, action: Action) -> None:
        """A microbatch whose first trainable stage is done has no more to say."""
        self._spills.end(action.stage, action.microbatch)
        if action.stage == self.placement.first:
            del self._walks[action.microbatch]

    def _backward_input(self, action: Action) -> None:
        self.gradients.defer()
        self._walks[action.microbatch].backward(action.stage)
        self._weight_work[action.stage, action.microbatch] = self.gradients.take()
        self._leave(action)

    def _backward_weight(self, action: Action) -> None:
        for weight, compute in self._weight_work.pop((action.stage, action.microbatch)):
            self.gradients.now(weight, compute)

    def _zero(self, stage: int) -> None:
        """Gradients that pass through the pool begin where something else was."""
        for index in self.placement.chunks_of[stage]:
            gradients = self.chunks[index].gradients
            if gradients is not None:
                gradients.zero_()

    def _square(self, stage: int) -> None:
        """Sum the squares of gradients that are complete and about to leave."""
        for index in self.placement.chunks_of[stage]:
            gradients = self.chunks[index].gradients
            if gradients is not None:
                norm = torch.linalg.vector_norm(gradients)
                self._squares[index] = float(norm.double().square())

    def _norm(self, action: Action) -> None:
        for stage in self._turns.at_norm:
            self._square(stage)
        squares = sum(self._squares[index] for index in sorted(self._squares))
        total = torch.tensor(squares, dtype=torch.float64)
        self._norm_value = float(self.collective.sum(total).sqrt())
        _finite(self._norm_value, "the weights were left unchanged")
        if self.clip is not None:
            self.updates.scale = min(1.0, self.clip / (self._norm_value + 1e-6))

    def _update(self, action: Action) -> None:
        if self.plan.update == "behind" and action.part in (WHOLE, 0):
            mine = self.placement.chunks_of[action.stage]
            part = sum(self._squares[i] for i in mine if i in self._squares)
            _finite(part**0.5, "some weights may have been updated")
        self._updating = True
        self.updates.run(action, self._lr, self.gradients.touched, self._outdated)

    # -- evaluation and state -------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any, rows: int) -> tuple[float, int]:
        """Sum of losses over a batch of `rows` rows, and the count of its valid targets."""
        size = self.plan.microbatch_rows
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        # What streams passes once for all microbatches; what is there needs them one by one.
        groups = [cuts] if self.placement.rooms else [[cut] for cut in cuts]
        total = sum(self._evaluate([self.flow.part(batch, *cut) for cut in g]) for g in groups)
        return total, int(self.flow.count(batch).item())

    def _evaluate(self, parts: list[Any]) -> float:
        count = len(parts)
        if count not in self._evaluations:
            schedule = self.placement.evaluation(count)
            lanes = Lanes(schedule, self.residence.device)
            self._evaluations[count] = (start_of(schedule), lanes)
        start, lanes = self._evaluations[count]
        try:
            self.residence.ensure(start)
            reader = Reader(self.residence, self.flow, parts)
            lanes.play(reader, time.perf_counter())
        except BaseException:
            self.residence.forget()
            raise
        return sum(reader.losses)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, in the precision that training continues from.

        Views of the device's buffers; of what rests below, of a copy of one chunk at a time: use
        each before the next.
        """
        for index in range(len(self.chunks)):
            yield from self._named(index, self._master(index), "")

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer states by "parameter.state", as `weights` gives weights."""
        for index, chunk in enumerate(self.chunks):
            for what in self.optimizer.states if chunk.table.trainable else ():
                yield from self._named(index, what, f".{what}")

    def _named(self, index: int, what: str, suffix: str) -> Iterator[tuple[str, Tensor]]:
        flat = self.residence.read(index, what)
        for slot in self.chunks[index].table.slots:
            yield f"{slot.name}{suffix}", slot.of(flat)

    def state_names(self) -> Iterator[str]:
        """The names that `optimizer_state` gives."""
        for chunk in self.chunks:
            for what in self.optimizer.states if chunk.table.trainable else ():
                yield from (f"{slot.name}.{what}" for slot in chunk.table.slots)

    @property
    def weights_dtype(self) -> torch.dtype:
        """What training continues from is held in."""
        dtypes = self.placement.dtypes
        return dtypes.parameters if dtypes.master is None else dtypes.master

    def weight_reader(self) -> Callable[[str], Tensor]:
        """Gives a weight by name. What rests below is read chunk by chunk: asked for in the order
        of the model, each is read once; a tensor stays good."""
        read = self.reader()
        return lambda name: read(name, None)

    def reader(self) -> Callable[[str, str | None], Tensor]:
        """Gives the named optimizer state of a parameter, or (None) its weight, as `weight_reader`
        does: it holds one state of one chunk."""
        where = {s.name: (i, s) for i, chunk in enumerate(self.chunks) for s in chunk.table.slots}
        last: dict[tuple[int, str], Tensor] = {}

        def read(name: str, state: str | None) -> Tensor:
            index, slot = where[name]
            key = (index, state or self._master(index))
            if key not in last:
                last.clear()
                last[key] = self.residence.read(*key)
            return slot.of(last[key])

        return read

    def load(self, value: Fill | None, state: Fill) -> None:
        """Replace every weight (value None: they stay) and every optimizer state, one at a time.

        value(parameter name, out) writes a weight into a tensor, state("parameter.state", out) a
        state.
        """
        for index, chunk in enumerate(self.chunks):
            if value is not None:
                self._replace(index, tuple(self._weights(index)), "", value)
            for what in self.optimizer.states if chunk.table.trainable else ():
                self._replace(index, (what,), f".{what}", state)

    def _replace(self, index: int, whats: tuple[str, ...], suffix: str, fill: Fill) -> None:
        """Fill the first of these states of a chunk anew; the others are the same, rounded."""
        flats = self.residence.staged(index, whats)
        first, *others = flats.values()
        with torch.no_grad():
            for slot in self.chunks[index].table.slots:
                fill(f"{slot.name}{suffix}", slot.of(first))
            for flat in others:
                flat.copy_(first)
        for what, flat in flats.items():
            self.residence.write(index, what, flat)

    def _master(self, index: int) -> str:
        return MASTER if self.residence.has(index, MASTER) else PARAMETERS

    def update_counts(self) -> dict[str, int]:
        """Updates that each parameter has had."""
        return {name: n for chunk in self.chunks for name, n in chunk.steps.items()}

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; the weights were loaded before."""
        for chunk in self.chunks:
            chunk.steps = {s.name: counts[s.name] for s in chunk.table.slots if s.name in counts}
        self._torn = False


class Reader:
    """Plays an evaluation: every microbatch forward, what streams beside it."""

    def __init__(self, residence: Residence, flow: Flow, parts: Sequence[Any]) -> None:
        self.residence, self.flow = residence, flow
        self.walks = [flow.begin(part, 1.0) for part in parts]
        self.losses = [0.0] * len(parts)

    def act(self, index: int, action: Action, begin: float) -> Event:
        """FORWARD of a stage."""
        walk = self.walks[action.microbatch]
        walk.forward(action.stage)
        if walk.loss is not None:
            self.losses[action.microbatch] = float(walk.loss)
        return _event(action, 0.0, 0.0, {}, 0)

    def prepare(self, index: int, action: Action) -> None:
        """Rooms are there."""

    def settle(self, index: int, action: Action) -> None:
        """Nothing is let go."""

    def move(self, index: int, action: Action, begin: float) -> Event:
        """Parameters come."""
        self.residence.fetch(moved(action))
        return _event(action, 0.0, 0.0, {}, 0)


def _event(action: Action, start: float, end: float, live: Mapping[str, int], peak: int) -> Event:
    return Event(
        0, action.lane.value, action.label, action.stage, action.microbatch, start, end, live, peak,
        action.part,
    )  # fmt: skip


def _finite(norm: float, after: str) -> None:
    if norm != norm or norm == float("inf"):
        raise Diverged(
            f"gradient norm is {norm} at this step; expected a finite number: lower the learning"
            f" rate or check the data; {after}"
        )
