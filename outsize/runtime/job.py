"""Job: a model under training. One `step` plays the plan's schedule over one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outsize.collectives import Alone, Collective
from outsize.errors import OutsizeError, nearest
from outsize.memory import Chunk, Meter, tables
from outsize.memory.chunk import Dtypes, adopt
from outsize.optim import Optimizer
from outsize.plan import Plan, Precision
from outsize.runtime.again import recomputed, tiled
from outsize.runtime.flow import Flow, Walk
from outsize.runtime.gradients import Compute, Gradients
from outsize.schedule import Action, Kind, Schedule, compile_plan, validate
from outsize.trace.trace import Event, Trace


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


def _check_parts(blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Refuse the name of a part that no block has: nothing would be computed again."""
    parts = {name for block in blocks for name, _ in block.named_modules() if name}
    for stage in plan.stages:
        for name in stage.recompute:
            if name != "block" and name not in parts:
                known = tuple(part for part in parts if "." not in part)
                raise OutsizeError(
                    f"plan: recompute holds {name!r}, which is no part of any block"
                    f"{nearest(name, ('block', *known))}"
                )


class Job:
    """Holds the chunks of a model and plays schedules over them.

    flow: the model. plan: how a step runs. optimizer: the update. groups and group_of: settings by
    parameter name (matrices decay, vectors do not, where none are given). clip: largest gradient
    norm. ledger: counts bytes while the job works, and raises over its budget.
    collective: who else trains.
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
    ) -> None:
        self.flow, self.plan, self.optimizer, self.clip = flow, plan, optimizer, clip
        self.groups = groups or (Group(optimizer.weight_decay), Group(0.0))
        self.ledger = ledger
        self.collective: Collective = collective or Alone()
        named = [params for _, params in flow.segments]
        self.owners = {name: p for params in named for name, p in params}
        group_of = group_of or {name: int(p.ndim < 2) for name, p in self.owners.items()}
        _check_parts(flow.blocks, plan)
        self.chunks = self._chunks(tables(named, group_of, flow.wide))
        self._first_stage = self._trainable_from()
        self.schedule = compile_plan(plan, self._first_stage)
        validate(self.schedule)
        self.gradients = Gradients(self.chunks, self.owners)
        flow.attach(self.gradients)
        self._wrapped = list(self._wrap())
        self._steps: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: lambda a: self._walks[a.microbatch].recompute(a.stage),
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.NORM: self._norm,
            Kind.UPDATE: self._update,
        }
        self._batch: Any = None
        self._torn = False  # some weights have had a step's update and some have not
        self._walks: dict[int, Walk] = {}
        self._weight_work: dict[tuple[int, int], list[tuple[Tensor, Compute]]] = {}

    # -- construction ---------------------------------------------------------------------------

    def _account(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.ledger is None else self.ledger.kind(kind)

    def _watch(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.ledger is None else self.ledger

    def _chunks(self, layout: Sequence[Any]) -> list[Chunk]:
        dtypes = dtypes_of(self.plan.precision)
        with self._watch():
            return [
                adopt(table, self.owners, dtypes, self.optimizer.states, self._account)
                for table in layout
            ]

    def _trainable_from(self) -> int:
        first = min((c.table.segment for c in self.chunks if c.table.trainable), default=None)
        if first is None:
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        return next(i for i, stage in enumerate(self.plan.stages) if stage.last > first)

    def _wrap(self) -> Iterator[nn.Module]:
        """Give the parts that are computed again or tiled another forward."""
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

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters stay views of the chunks."""
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
        trace = self._play(self.schedule, begin)
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
        self._norm_value, self._scale = 0.0, 1.0
        if self.ledger is not None:
            with self.ledger.kind("data"):
                for tensor in _tensors(batch):
                    self.ledger.see(tensor)

    def _play(self, schedule: Schedule, begin: float) -> Trace:
        events: list[Event] = []
        try:
            with self._watch():
                for action in schedule.workers[0]:
                    events.append(self.act(action, begin))
        except BaseException:
            self._torn = any(event.kind == Kind.NORM for event in events)
            self._abandon()
            raise
        return Trace("measured", tuple(events))

    def act(self, action: Action, begin: float) -> Event:
        """Run one action of a step that is under way; times count from `begin`."""
        ledger = self.ledger
        if ledger is not None:
            ledger.reset_peak()
        start = time.perf_counter()
        self._steps[action.kind](action)
        end = time.perf_counter()
        live, peak = {}, 0
        if ledger is not None:
            ledger.settle()
            peak = ledger.peak
            live = {f"device/{kind}": count for kind, count in ledger.live.items() if count}
        return Event(
            0, action.lane.value, action.kind.value, action.stage, action.microbatch,
            start - begin, end - begin, live, peak,
        )  # fmt: skip

    def _abandon(self) -> None:
        """Forget a step that failed: no activation, no half-summed gradient remains."""
        self._walks.clear()
        self._weight_work.clear()
        self.gradients.reset()
        for chunk in self.chunks:
            if chunk.gradients is not None:
                chunk.gradients.zero_()

    def _forward(self, action: Action) -> None:
        m = action.microbatch
        if action.stage == 0:
            with self._account("data"):
                part = self.flow.part(self._batch, *self.plan.rows_of(m))
            self._walks[m] = self.flow.begin(part, self._factor)
        walk = self._walks[m]
        walk.forward(action.stage)
        if action.stage == len(self.plan.stages) - 1:
            assert walk.loss is not None
            loss = walk.loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss

    def _backward(self, action: Action) -> None:
        self._walks[action.microbatch].backward(action.stage)
        self._leave(action)

    def _leave(self, action: Action) -> None:
        """A microbatch whose first trainable stage is done has no more to say."""
        if action.stage == self._first_stage:
            del self._walks[action.microbatch]

    def _backward_input(self, action: Action) -> None:
        self.gradients.defer()
        self._walks[action.microbatch].backward(action.stage)
        self._weight_work[action.stage, action.microbatch] = self.gradients.take()
        self._leave(action)

    def _backward_weight(self, action: Action) -> None:
        for weight, compute in self._weight_work.pop((action.stage, action.microbatch)):
            self.gradients.now(weight, compute)

    def _norm(self, action: Action) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for chunk in self.chunks:
            if chunk.gradients is not None:
                norm = torch.linalg.vector_norm(chunk.gradients)
                total = total + norm.double().square().cpu()
        self._norm_value = float(self.collective.sum(total).sqrt())
        if self._norm_value != self._norm_value or self._norm_value == float("inf"):
            raise Diverged(
                f"gradient norm is {self._norm_value} at this step; expected a finite number:"
                " lower the learning rate or check the data; the weights were left unchanged"
            )
        if self.clip is not None:
            self._scale = min(1.0, self.clip / (self._norm_value + 1e-6))

    def _update(self, action: Action) -> None:
        stage = self.plan.stages[action.stage]
        for chunk in self.chunks:
            if chunk.gradients is None or not stage.first <= chunk.table.segment < stage.last:
                continue
            if self._scale < 1.0:
                chunk.gradients.mul_(self._scale)
            for first, last, group, step in self._ranges(chunk):
                here = slice(first, last)
                settings = self.groups[group]
                self.optimizer.update(
                    chunk.weights[here],
                    chunk.gradients[here],
                    {name: flat[here] for name, flat in chunk.optimizer.items()},
                    step,
                    self._lr * settings.lr,
                    settings.weight_decay,
                )
            chunk.publish()
            chunk.gradients.zero_()
            self.gradients.touched.difference_update(slot.name for slot in chunk.table.slots)

    def _ranges(self, chunk: Chunk) -> list[tuple[int, int, int, int]]:
        """(first, last, group, step) of the runs of parameters that are updated alike.

        A parameter that no gradient reached is left alone, as torch.optim leaves one without.
        """
        runs: list[tuple[int, int, int, int]] = []
        for slot in chunk.table.slots:
            if slot.name not in self.gradients.touched:
                continue
            step = chunk.steps[slot.name] = chunk.steps.get(slot.name, 0) + 1
            end = slot.offset + slot.numel
            if runs and runs[-1][1:] == (slot.offset, slot.group, step):
                runs[-1] = (runs[-1][0], end, slot.group, step)
            else:
                runs.append((slot.offset, end, slot.group, step))
        return runs

    # -- evaluation and state -------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any, rows: int) -> tuple[float, int]:
        """Sum of losses over a batch of `rows` rows, and the count of its valid targets."""
        total, size = 0.0, self.plan.microbatch_rows
        for start in range(0, rows, size):
            walk = self.flow.begin(self.flow.part(batch, start, min(start + size, rows)), 1.0)
            for stage in range(len(self.plan.stages)):
                walk.forward(stage)
            assert walk.loss is not None
            total += float(walk.loss)
        return total, int(self.flow.count(batch).item())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, in the precision that training continues from: views."""
        for chunk in self.chunks:
            for slot, views in chunk.views():
                yield slot.name, views["weights"]

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer states by "parameter.state": views."""
        for chunk in self.chunks:
            for slot, views in chunk.views():
                for name in chunk.optimizer:
                    yield f"{slot.name}.{name}", views[name]

    def update_counts(self) -> dict[str, int]:
        """Updates that each parameter has had."""
        return {name: n for chunk in self.chunks for name, n in chunk.steps.items()}

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; then `publish` what was loaded."""
        for chunk in self.chunks:
            chunk.steps = {s.name: counts[s.name] for s in chunk.table.slots if s.name in counts}
            chunk.publish()
        self._torn = False
