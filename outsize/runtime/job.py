"""Job: a model under training. One `step` plays the plan's schedule over one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import Lone, World, along
from outsize.errors import OutsizeError
from outsize.memory import Meter, tables
from outsize.memory.store import Store
from outsize.models.cuts import NO_CUTS, Cut
from outsize.optim import Optimizer
from outsize.parallel.wholes import Wholes
from outsize.plan import Plan
from outsize.runtime.checks import (
    by_shape,
    check,
    check_pipeline,
    check_same,
    check_world,
    matrices_of,
    placement_of,
)
from outsize.runtime.evaluation import Evaluation, start_of
from outsize.runtime.everybody import Everybody
from outsize.runtime.flow import Flow, Walk, Way
from outsize.runtime.gradients import Compute, Gradients
from outsize.runtime.lanes import Lanes
from outsize.runtime.passing import Passing, shapes_of, tensors_of
from outsize.runtime.peers import Peers
from outsize.runtime.residence import NO_STORES, Residence, transfer
from outsize.runtime.spill import Entry, Spill, Spills
from outsize.runtime.states import Fill as Fill
from outsize.runtime.states import Stateful, States
from outsize.runtime.turns import Turns
from outsize.runtime.update import Updates
from outsize.runtime.wrapped import wrapped
from outsize.schedule import Action, Kind, Lane, Schedule, State, validate
from outsize.schedule.action import WHOLE
from outsize.trace.trace import Event, Trace

_NOWHERE = frozenset[int]()  # the stages of a microbatch that has none here


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


class Job(Stateful):
    """Holds the chunks of a model and plays schedules over them.

    flow: the model. plan: how a step runs. optimizer: the update. groups and group_of: settings by
    parameter name (matrices decay, vectors do not, where none are given). clip: largest gradient
    norm. ledger: counts bytes while the job works, and raises over its budget.
    stores: by name, the tiers below the device; the caller closes them. fill: writes the values of
    the parameter of a name into a tensor, for parameters that have no memory of their own
    (outsize/models/build.py, `shells`). world: the workers, this one among them; each makes a Job
    of the same plan and calls the same methods in the same order. cuts: which part of a parameter
    the model has here, where the tensor axis has several workers; `fill` still writes whole ones.
    at: told what each thread is about to do, for who watches the workers (outsize/launch/pulse.py).
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
        stores: Mapping[str, Store] = NO_STORES,
        fill: Fill | None = None,
        world: World | None = None,
        cuts: Mapping[str, Cut] = NO_CUTS,
        at: Callable[[str], None] | None = None,
    ) -> None:
        self.flow, self.plan, self.optimizer, self.clip = flow, plan, optimizer, clip
        self.ledger, self.stores = ledger, stores
        self.world, self._at = world or Lone(), at
        check_world(plan, self.world, cuts)
        named = [params for _, params in flow.segments]
        self.owners = {name: p for params in named for name, p in params}
        check(flow, plan, clip)
        matrices = matrices_of(flow, optimizer, cuts)
        layout = tables(named, group_of or by_shape(self.owners), flow.wide, matrices, cuts)
        self.place = plan.mesh.index("data", self.world.rank)
        self.placement = placement_of(flow, plan, layout, optimizer, stores, self.world)
        check_pipeline(self.placement)
        if self.placement.first == len(plan.stages):
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        self.schedule = self.placement.schedule
        validate(self.schedule)
        device = next(iter(self.owners.values())).device
        self._spills = Spills(ledger)
        self._all = Everybody(self.world, self.placement)
        self.peers = Peers(self.world, self.placement)
        line = along(self.world, "pipeline")
        check_same(self.placement, line)
        self.wholes = Wholes(cuts, along(self.world, "tensor"), line)
        self.rows = flow.rows
        self.passing: Passing | None = None
        if self.placement.pipelining is not None:
            self.passing = Passing(self.world, self.placement, device, self._account, self.rows)
        with self._watch():
            self.residence = Residence(self.placement, stores, device, self._account, self.peers)
            self.chunks = self.residence.chunks
            self.states = States(self.residence, self.wholes, self.owners, line)
            self._adopt(fill)
        groups = groups or (Group(optimizer.weight_decay), Group(0.0))
        self.updates = Updates(self.residence, optimizer, groups, self.wholes)
        self.gradients = Gradients(self.chunks, self.owners)
        flow.attach(self.gradients)
        self._wrapped = list(wrapped(flow, plan, self._spills))
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
        if (rows := flow.rows) is not None:
            self._steps |= {
                Kind.EMBED: self._embed,
                Kind.EMBED_BACKWARD: lambda a: rows.embed_backward(a.microbatch),
                Kind.OUTPUT_S: lambda a: rows.score(a.microbatch),
                Kind.OUTPUT_T: self._settle,
            }
        self._evaluation = Evaluation(self.residence, flow, self.passing)
        self._outdated = False  # the update at hand changes parameters that the pool holds still
        self._batch: Any = None
        self._torn = False  # some weights have had a step's update and some have not
        self._walks: dict[int, Walk] = {}
        self._shapes: dict[int, Hashable] = {}  # by microbatch
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
                self.wholes.cutting(fill)(name, out)
            parameter.data = views[name]  # what it held before goes now

        for index in range(len(self.placement.tables)):
            chunk = residence.make(index)
            self._spills.kept.add(chunk.parameters.untyped_storage()._cdata)
            views |= {slot.name: slot.of(chunk.parameters) for slot in chunk.table.slots}
            self.states.replace(index, tuple(self.states.weights_of(index)), "", take)
        nothing: dict[torch.dtype, Tensor] = {}
        for name, parameter in self.owners.items():
            if name not in views:  # of a stage on other workers: its shape is all that stays
                if parameter.dtype not in nothing:
                    nothing[parameter.dtype] = parameter.data.new_full((), float("nan"))
                parameter.data = nothing[parameter.dtype].expand(parameter.shape)

    def follow(self, schedule: Schedule) -> None:
        """Play a schedule from now on: one that `validate` has passed, over the same rooms."""
        self.schedule, self._turns = schedule, Turns(schedule, self.placement)
        self._lanes = Lanes(schedule, self.residence.device)

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters stay views of the chunks.

        Of what rests below the device, the parameters have the values that happen to be in the
        pool, and of stages on other workers none: read `weights` before.
        """
        for part, before in self._wrapped:
            del part.forward
            if before is not None:
                part.forward = before
        self.flow.attach(None)
        self.gradients.close()
        if self.passing is not None:
            self.passing.close()

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
        count = self._all.count(self.flow.count(batch))
        if not count:
            raise OutsizeError("batch: no valid target in the whole step; expected one at least")
        self.ready(batch, count, lr)
        trace = self._play(begin)
        assert self._loss is not None
        loss = self._loss
        self.report = Report(
            float(loss), self._norm_value, int(count), time.perf_counter() - begin, trace
        )
        return loss

    def ready(self, batch: Any, count: float, lr: float | None = None) -> None:
        """Set out on a step: its batch, the one number that losses are divided by, its rate."""
        if self.ledger is not None:
            for tensor in tensors_of(self._batch):  # the caller may keep it; the step does not
                self.ledger.release(tensor)
        self._batch, self._factor = batch, 1.0 / count
        self._lr = self.optimizer.lr if lr is None else lr
        self._loss: Tensor | None = None
        self._norm_value, self.updates.scale = 0.0, 1.0
        self._squares: dict[int, float] = {}
        if self.ledger is not None:
            with self.ledger.kind("data"):
                for tensor in tensors_of(batch):
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
        return Trace("measured", tuple(events), begin=begin)

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
        self._tell(action)
        if self.passing is not None:
            self.passing.sweep()
        start = time.perf_counter()
        for stage in self._turns.anew.get(index, ()):
            self._zero(stage)
        self._outdated = index in self._turns.outdated
        self._steps[action.kind](action)
        for stage in self._turns.complete.get(index, ()):
            self._square(stage)
        self._leave(index)
        end = time.perf_counter()
        live, peak = {}, 0
        if ledger is not None:
            ledger.settle()
            peak = ledger.peak
            live = {f"device/{kind}": count for kind, count in ledger.live.items() if count}
        return _event(action, start - begin, end - begin, live, peak)

    # -- other lanes ----------------------------------------------------------------------------

    def prepare(self, index: int, action: Action) -> None:
        """Make room for activations that come; what other workers compute with leaves."""
        if action.kind in (Kind.SEND, Kind.RECV):
            self._pass(index, action)
        elif action.kind is Kind.EXCHANGE:
            assert self.rows is not None
            self.rows.announce(action.state, action.microbatch)
        elif action.kind is Kind.FETCH and action.state is State.ACTIVATIONS:
            here = (action.stage, action.microbatch)
            with self._account("activations"):
                self._missing[here] = self._spills.of(*here).allocate()

    def move(self, index: int, action: Action, begin: float) -> Event:
        """Run an action of another lane."""
        self._tell(action)
        start = time.perf_counter()
        if action.kind is Kind.UPDATE:
            self._updating = True
            self.updates.at_rest(action, self._lr, self.gradients.touched)
        elif action.kind in (Kind.SEND, Kind.RECV):
            assert self.passing is not None
            self.passing.move(action, self._shapes[action.microbatch])
        elif action.kind is Kind.EXCHANGE:
            assert self.rows is not None
            self.rows.exchange(action.state, action.microbatch)
        elif action.state is State.ACTIVATIONS:
            self._move_activations(action)
        else:
            transfer(self.residence, action, index in self._turns.sums)
        return _event(action, start - begin, time.perf_counter() - begin, {}, 0)

    def _tell(self, action: Action) -> None:
        if self._at is not None:
            self._at(f"{action.label} {action.stage} {action.microbatch}")

    def begin(self, microbatch: int) -> None:
        """Take up a microbatch, before its first action."""
        self._walk(microbatch)

    def loss_bytes(self, microbatch: int) -> int:
        """Of the loss that a microbatch under way keeps, once the last stage has run forward."""
        loss = self._walks[microbatch].loss
        return 0 if loss is None else loss.nbytes

    def outputs(self, stage: int, microbatch: int) -> list[Tensor]:
        """What a stage has given, while the next one has not begun."""
        walk = self._walks[microbatch]
        found = walk.take(stage)
        walk.put(stage, found)
        return found

    def _pass(self, index: int, action: Action) -> None:
        assert self.passing is not None
        m = action.microbatch
        walk = self._walk(m)
        self.passing.prepare(action, walk, self._shapes[m])
        self._leave(index)

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
        if self.passing is not None:
            self.passing.reset()
        if self.rows is not None:
            self.rows.reset()
        self.gradients.reset()
        self.updates.reset()
        self.residence.forget()
        for chunk in self.chunks:
            if chunk.gradients is not None:
                chunk.gradients.zero_()

    def _walk(self, m: int) -> Walk:
        """The walk of a microbatch; it begins with the first action that needs it."""
        if m not in self._walks:
            with self._account("data"):
                part = self.flow.part(self._batch, *self.plan.rows_of(m, self.place))
            self._shapes[m] = () if self.passing is None else shapes_of(part)
            spill_of = partial(self._spill_of, m)
            way = Way(m, self.schedule.begin(m), self.schedule.end(m))
            held = self._turns.held.get(m, _NOWHERE) if self.schedule.role else None
            self._walks[m] = self.flow.begin(part, self._factor, spill_of, held, way)
        return self._walks[m]

    def _handed(self, action: Action) -> Walk:
        """The walk of an action, with what has come from other workers for it."""
        walk = self._walk(action.microbatch)
        if self.passing is not None:
            self.passing.hand(action, walk)
        return walk

    def _forward(self, action: Action) -> None:
        walk = self._handed(action)
        self._spill_of(action.microbatch, action.stage)  # of a stage without blocks it stays empty
        walk.forward(action.stage)
        if action.stage == len(self.plan.stages) - 1 and walk.loss is not None:
            self._lose(walk.loss.detach())

    def _lose(self, loss: Tensor) -> None:
        """Add a loss: in place, and to a copy, for a graph may have saved the first one."""
        if self._loss is None:
            self._loss = loss.clone()
        else:
            self._loss += loss

    def _embed(self, action: Action) -> None:
        assert self.rows is not None
        self._walk(action.microbatch)
        self.rows.embed(action.microbatch)

    def _settle(self, action: Action) -> None:
        """The rest of the head; the loss is the same on all workers: the first one counts it."""
        assert self.rows is not None
        loss = self.rows.settle(action.microbatch)
        if not self.placement.turn:
            self._lose(loss)

    def _spill_of(self, microbatch: int, stage: int) -> Spill | None:
        if (stage, microbatch) not in self._turns.spilled:
            return None
        here = self.plan.stages[stage]
        store = self.stores[here.rest.activations]
        return self._spills.begin(stage, microbatch, store, bool(here.spill))

    def _backward(self, action: Action) -> None:
        self._handed(action).backward(action.stage)
        self._spills.end(action.stage, action.microbatch)

    def _leave(self, index: int) -> None:
        """A microbatch that nothing behind this place needs has no more to say."""
        if index in self._turns.ends:
            microbatch = self._turns.ends[index]
            del self._walks[microbatch]
            if self.rows is not None:
                self.rows.end(microbatch)

    def _backward_input(self, action: Action) -> None:
        self.gradients.defer()
        self._backward(action)
        self._weight_work[action.stage, action.microbatch] = self.gradients.take()

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
        """Sum the squares of gradients that are complete: those that this worker updates."""
        for index in self.placement.chunks_of[stage]:
            gradients = self.residence.updated_gradients(index)
            if gradients is not None:
                norm = torch.linalg.vector_norm(gradients)
                self._squares[index] = float(norm.double().square())

    def _norm(self, action: Action) -> None:
        for stage in self._turns.at_norm:
            self._square(stage)
        squares, loss = self._all.sums(self._squares, self._loss, self.gradients.touched)
        self._norm_value, self._loss = squares**0.5, loss
        _finite(self._norm_value, "the weights were left unchanged")
        if self.clip is not None:
            self.updates.scale = min(1.0, self.clip / (self._norm_value + 1e-6))

    def _update(self, action: Action) -> None:
        if self.plan.update == "behind" and action.part in (WHOLE, 0):
            if action.stage in self._turns.at_update:
                self._square(action.stage)
            mine = self.placement.chunks_of[action.stage]
            here = {i: self._squares[i] for i in mine if i in self._squares}
            part = self._all.stage(action.stage, here, self.gradients.touched)
            _finite(part**0.5, "some weights may have been updated")
        self._updating = True
        self.updates.run(action, self._lr, self.gradients.touched, self._outdated)

    # -- evaluation and state -------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any, rows: int) -> tuple[float, int]:
        """Sum of losses over a batch of `rows` rows, and the count of its valid targets; of all
        workers' batches, of one row at least each."""
        size = self.plan.microbatch_rows
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        # What streams passes once for all microbatches, and a pipeline is full of them; what is
        # there needs them one by one.
        together = self.placement.rooms or self.passing is not None
        groups = [cuts] if together else [[cut] for cut in cuts]
        parts = ([self.flow.part(batch, *cut) for cut in group] for group in groups)
        total = sum(map(self._evaluation.losses, parts))
        total, count = self._all.evaluated(total, self.flow.count(batch))
        return total, int(count)

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; the weights were loaded before."""
        super().restore_counts(counts)
        self._torn = False


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
