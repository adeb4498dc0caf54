"""Zeroth-order fine-tuning: two losses a step in place of a backward pass, on weights that stream.

The loss is taken at w + eps z and at w - eps z for one random direction z. The difference over
2 eps is the slope along z, and w moves by -lr * slope * z (Malladi et al., "Fine-Tuning Language
Models with Just Forward Passes" (MeZO), 2023). There are no gradients, no optimizer states and no
kept activations, so the weights are all there is, and they can rest on any tier.

Both losses pass through a block while it is present, and a block takes the update of step t when it
comes by in step t + 1, so weights are fetched and written once a step (Wang et al., "ZO2", 2025).
Here that is a Schedule of UPDATE and FORWARD: the same pool, rooms and lanes as everywhere.

    job = ZerothJob(flow, plan, Zeroth(lr=1e-6))   # plan.approximate: [zeroth-order]
    loss = job.step(batch)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.memory import Meter, tables
from outsize.memory.store import Store
from outsize.plan import Plan
from outsize.runtime.checks import dtypes_of
from outsize.runtime.evaluation import start_of
from outsize.runtime.flow import Flow, Walk
from outsize.runtime.forwards import Zeroth, check, placement_of, schedule_of, still, uses_of
from outsize.runtime.held import Held
from outsize.runtime.job import Diverged, Report
from outsize.runtime.lanes import Lanes
from outsize.runtime.perturb import MINUS, NONE, PLUS, Direction, Move, Perturbed
from outsize.runtime.residence import NO_STORES, Residence
from outsize.runtime.states import Fill
from outsize.schedule import Action, Kind, Lane
from outsize.schedule.residency import moved
from outsize.trace.trace import Event, Trace


class ZerothJob:
    """Trains a model by losses alone; used like Job.

    flow: the model. plan: names "zeroth-order" under approximate; its parameters' tiers, stream,
    rows and precision are used (with a master copy, the weights are held as that is, and the model
    computes on roundings of them). settings: of the method. ledger, stores, fill: as for Job.
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        settings: Zeroth | None = None,
        ledger: Meter | None = None,
        stores: Mapping[str, Store] = NO_STORES,
        fill: Fill | None = None,
    ) -> None:
        self.optimizer = settings or Zeroth()
        check(plan, self.optimizer)
        self.flow, self.plan, self.ledger, self.stores = flow, plan, ledger, stores
        named = [params for _, params in flow.segments]
        self.owners = {name: p for params in named for name, p in params}
        layout = tables(named, dict.fromkeys(self.owners, 0), flow.wide)
        self.learns = tuple(table.trainable for table in layout)
        if not any(self.learns):
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        self.placement = placement_of(plan, layout)
        self.schedule = schedule_of(self.placement, self.learns)
        self.device = next(iter(self.owners.values())).device
        with self._watch():
            self.residence = Residence(self.placement, stores, self.device, self._account)
            self._adopt(fill)
        self.chunks = self.residence.chunks
        self._lanes = Lanes(self.schedule, self.device)
        self._step = 0
        self._due: Move | None = None
        self._torn = False  # some weights have had a step's update and some have not
        self._walks: list[Walk] = []
        self._signs: Sequence[int] = ()

    # -- construction -----------------------------------------------------------------------------

    def _account(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.ledger is None else self.ledger.kind(kind)

    def _watch(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.ledger is None else self.ledger

    def _adopt(self, fill: Fill | None) -> None:
        """Move the parameters' values into chunks; the parameters become views of copies."""
        self._held = Held(self.residence, self.learns)
        self._held.adopt(self.owners, fill)
        uses = uses_of(self.flow, self.placement)
        compute = dtypes_of(self.plan.precision).parameters
        self._perturbed = Perturbed(
            self.residence, self.owners, self.learns, uses, compute, self._account
        )

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters are the weights as they are
        held. Of what rests below the device, read `weights` before."""
        self.catch_up()
        for chunk in self.chunks:
            for slot in chunk.table.slots:
                self.owners[slot.name].data = slot.of(chunk.parameters)
        self.flow.attach(None)

    # -- one step ---------------------------------------------------------------------------------

    def step(self, batch: Any, lr: float | None = None) -> Tensor:
        """Train on one batch; gives the mean of the two losses, a scalar tensor.

        lr: this step's learning rate; that of the settings where none is given. In `report`, norm
        is the slope along the direction. Dropout is off: both losses must be of one function.
        """
        begin = time.perf_counter()
        if self._torn:
            raise OutsizeError(
                "job: a step was cut off while it updated the weights; load a checkpoint to go on"
            )
        count = self.flow.count(batch).item()
        if not count:
            raise OutsizeError("batch: no valid target in the whole step; expected one at least")
        with torch.no_grad(), still(self.flow.model):
            self.ready(batch, count)
            trace = self._play(begin)
        return self._conclude(self._losses(), lr, int(count), trace, begin)

    def ready(self, batch: Any, count: float) -> None:
        """Set out on a step: its batch and the one number that losses are divided by."""
        rows = [self.plan.rows_of(m) for m in range(self.plan.microbatches)]
        self._signs = [PLUS] * len(rows) + [MINUS] * len(rows)
        with self._account("data"):
            parts = [self.flow.part(batch, *cut) for cut in rows]
        self._walks = [self.flow.begin(part, 1.0 / count) for part in (*parts, *parts)]
        self._perturbed.begin()

    def alone(self, index: int, action: Action) -> Event:
        """One action of a step that is under way, on the calling thread whatever its lane."""
        run = self.act if action.lane is Lane.COMPUTE else self.move
        return run(index, action, 0.0)

    def _losses(self) -> list[Tensor]:
        walks, self._walks = self._walks, []
        return [walk.loss.double() for walk in walks if walk.loss is not None]

    def _conclude(
        self, losses: list[Tensor], lr: float | None, count: int, trace: Trace, begin: float
    ) -> Tensor:
        half = len(losses) // 2
        plus, minus = torch.stack(losses[:half]).sum(), torch.stack(losses[half:]).sum()
        slope = float(plus - minus) / (2 * self.optimizer.epsilon)
        if not math.isfinite(slope):
            raise Diverged(
                f"loss is {float(plus)} and {float(minus)} on either side of the weights; expected"
                " finite numbers: lower the learning rate or check the data; the weights were left"
                " unchanged"
            )
        self.slope = slope  # along the direction of the last step
        rate = self.optimizer.lr if lr is None else lr
        self._due = Move(self._direction, -rate * slope, rate * self.optimizer.weight_decay)
        self._step += 1
        loss = (plus + minus) / 2
        self.report = Report(float(loss), abs(slope), count, time.perf_counter() - begin, trace)
        return loss

    @property
    def _direction(self) -> Direction:
        return Direction(self.optimizer.seed, self._step)

    def _play(self, begin: float) -> Trace:
        try:
            with self._watch():
                self.residence.ensure(start_of(self.schedule))
                events = self._lanes.play(self, begin)
        except BaseException:
            self._torn = self._due is not None
            self._walks.clear()
            self.residence.forget()
            raise
        self._due = None
        return Trace("measured", tuple(events), begin=begin)

    def act(self, index: int, action: Action, begin: float) -> Event:
        """Run one computing action."""
        ledger = self.ledger
        if ledger is not None:
            ledger.reset_peak()
        start = time.perf_counter()
        if action.kind is Kind.UPDATE:
            self._update(action.stage)
        else:
            sign, s = self._signs[action.microbatch], action.stage
            self._perturbed.enter(s, sign, self._direction, self.optimizer.epsilon)
            self._walks[action.microbatch].forward(s)
        end = time.perf_counter()
        live, peak = {}, 0
        if ledger is not None:
            ledger.settle()
            peak = ledger.peak
            live = {f"device/{kind}": count for kind, count in ledger.live.items() if count}
        return _event(action, start - begin, end - begin, live, peak)

    def _update(self, stage: int) -> None:
        """What the step before has found, now that the stage's weights are here."""
        if self._due is None:
            return
        for index in self.placement.chunks_of[stage]:
            if self.learns[index]:
                self._due.apply(self.placement.tables[index], self.chunks[index].parameters)

    def prepare(self, index: int, action: Action) -> None:
        """Rooms are there."""

    def settle(self, index: int, action: Action) -> None:
        """Nothing is let go."""

    def move(self, index: int, action: Action, begin: float) -> Event:
        """Weights come or go."""
        start = time.perf_counter()
        fetch = action.kind is Kind.FETCH
        (self.residence.fetch if fetch else self.residence.evict)(moved(action))
        return _event(action, start - begin, time.perf_counter() - begin, {}, 0)

    # -- evaluation and state ---------------------------------------------------------------------

    @torch.no_grad()
    def catch_up(self) -> None:
        """Give the weights what the last step has found: a pass over all of them."""
        due, self._due = self._due, None
        if due is not None:
            self._held.change(due.apply)

    @torch.no_grad()
    def evaluate(self, batch: Any, rows: int) -> tuple[float, int]:
        """Sum of losses over a batch of `rows` rows, and the count of its valid targets."""
        self.catch_up()
        size = self.plan.microbatch_rows
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        parts = [self.flow.part(batch, *cut) for cut in cuts]
        schedule = self.placement.evaluation(len(parts))
        self._walks = [self.flow.begin(part, 1.0) for part in parts]
        self._signs = [NONE] * len(parts)
        self._perturbed.begin()
        self.residence.ensure(start_of(schedule))
        Lanes(schedule, self.device).play(self, time.perf_counter())
        return float(torch.stack(self._losses()).sum()), int(self.flow.count(batch).item())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name as it is held, all steps included; see Job.weights."""
        self.catch_up()
        return self._held.weights()

    @property
    def weights_dtype(self) -> torch.dtype:
        """What training continues from is held in."""
        return self.placement.dtypes.parameters

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self.owners[name].shape)

    def weight_reader(self) -> Callable[[str], Tensor]:
        """Gives a weight by name; see Job.weight_reader."""
        self.catch_up()
        return self._held.reader()

    def reader(self) -> Callable[[str, str | None], Tensor]:
        """Gives (name, None) a weight; there is no state."""
        held = self.weight_reader()

        def read(name: str, state: str | None) -> Tensor:
            assert state is None
            return held(name)

        return read

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """None is kept."""
        return iter(())

    def state_names(self) -> Iterator[str]:
        """None is kept."""
        return iter(())

    @torch.no_grad()
    def load(self, value: Fill | None, state: Fill) -> None:
        """Replace every weight: value(parameter name, out) writes it. There is no state to fill."""
        if value is None:
            self.catch_up()
            return
        self._held.load(value)
        self._due = None

    def update_counts(self) -> dict[str, int]:
        """Steps that each trained parameter has had: what names the next direction."""
        return dict.fromkeys(self._held.trained(), self._step)

    def show(self, stage: int) -> None:
        """Have a stage's parameters hold the weights as they are: all steps must have been caught
        up with, its room must hold them, and another stage's parameters may lose theirs."""
        self._perturbed.enter(stage, NONE, self._direction, self.optimizer.epsilon)

    def hide(self) -> None:
        """What parameters hold is of no use any more."""
        self._perturbed.begin()

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Go on from there; the weights were loaded before."""
        self._step, self._torn = max(counts.values(), default=0), False


def _event(action: Action, start: float, end: float, live: Mapping[str, int], peak: int) -> Event:
    return Event(
        0, action.lane.value, action.label, action.stage, action.microbatch, start, end, live, peak,
        action.part,
    )  # fmt: skip
