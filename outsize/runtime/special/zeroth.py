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
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.memory import Meter, tables
from outsize.memory.store import Store
from outsize.plan import Plan
from outsize.runtime.checks import check_weight, dtypes_of
from outsize.runtime.engine import Deed, Engine, Handler, Loaded, Ran
from outsize.runtime.flow import Flow, Walk
from outsize.runtime.generating import TokenSteps, native, proved
from outsize.runtime.handlers.norm import Diverged
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.handlers.states import Movement
from outsize.runtime.points import Points
from outsize.runtime.report import Report
from outsize.runtime.special.forwards import Zeroth, check, still, uses_of
from outsize.runtime.special.perturb import MINUS, NONE, PLUS, Direction, Move, Perturbed
from outsize.runtime.storage.held import Held
from outsize.runtime.storage.states import Fill
from outsize.runtime.storage.weight_pool import NO_STORES, WeightPool
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind, Schedule, prove
from outsize.schedule.action import AHEAD
from outsize.schedule.compile.zeroth import placement_of, step_of
from outsize.schedule.programs import evaluate


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
        self.flow, self.plan, self.stores, self.watch = flow, plan, stores, Watch(ledger)
        named = [params for _, params in flow.segments]
        self.owners = {name: p for params in named for name, p in params}
        layout = tables(named, dict.fromkeys(self.owners, 0), flow.wide)
        self.learns = tuple(table.trainable for table in layout)
        if not any(self.learns):
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        self.placement = placement_of(plan, layout)
        schedule = step_of(self.placement, self.learns)
        prove(schedule)
        self.device = next(iter(self.owners.values())).device
        with self.watch.on():
            self.weight_pool = WeightPool(self.placement, stores, self.device, self.watch.kind)
            self._adopt(fill)
        self.chunks = self.weight_pool.chunks
        self._losing = Losing(self)
        self._sample = Sample(lambda m: self._walks[m].loss)
        handlers: list[Handler] = [self._losing, Movement(self.weight_pool), self._sample]
        self.engine = Engine(handlers, self.device, self.watch)
        self.loaded = self._playable(schedule)
        self._step = 0
        self._due: Move | None = None
        self._torn = False  # some weights have had a step's update and some have not
        self._walks: list[Walk] = []
        self._signs: Sequence[int] = ()

    # -- construction -----------------------------------------------------------------------------

    @property
    def ledger(self) -> Meter | None:
        """Counts bytes while the job works."""
        return self.watch.ledger

    @ledger.setter
    def ledger(self, ledger: Meter | None) -> None:
        self.watch.ledger = ledger

    @property
    def schedule(self) -> Schedule:
        """One step."""
        return self.loaded.schedule

    def _playable(self, schedule: Schedule) -> Loaded:
        return self.engine.load(schedule, Points(schedule, self.placement.items.residency.uses))

    def _adopt(self, fill: Fill | None) -> None:
        """Move the parameters' values into chunks; the parameters become views of copies."""
        self._held = Held(self.weight_pool, self.learns)
        self._held.adopt(self.owners, fill)
        uses = uses_of(self.flow, self.placement.chunks)
        compute = dtypes_of(self.plan.precision).parameters
        self._perturbed = Perturbed(
            self.weight_pool, self.owners, self.learns, uses, compute, self.watch.kind
        )

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters are the weights as they are
        held. Of what rests below the device, read `weights` before."""
        self.catch_up()
        for chunk in self.chunks:
            for slot in chunk.table.slots:
                self.owners[slot.name].data = slot.of(chunk.parameters)
        self.flow.attach(None)
        self.engine.close()

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
        weight, count = self.flow.count(batch).tolist()
        check_weight(weight)
        with torch.no_grad(), still(self.flow.model):
            self.ready(batch, weight)
            ran = self._play(begin)
        return self._conclude(self._losses(), lr, int(count), ran, begin)

    def ready(self, batch: Any, count: float) -> None:
        """Set out on a step: its batch and the one number that losses are divided by."""
        rows = [self.plan.rows_of(m) for m in range(self.plan.microbatches)]
        self._signs = [PLUS] * len(rows) + [MINUS] * len(rows)
        with self.watch.kind("data"):
            parts = [self.flow.part(batch, *cut) for cut in rows]
        self._walks = [self.flow.begin(part, 1.0 / count) for part in (*parts, *parts)]
        self._perturbed.begin()

    def _losses(self) -> list[Tensor]:
        walks, self._walks = self._walks, []
        return [walk.loss.double() for walk in walks if walk.loss is not None]

    def _conclude(
        self, losses: list[Tensor], lr: float | None, count: int, ran: list[Ran], begin: float
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
        self.report = Report(
            float(loss), abs(slope), count, time.perf_counter() - begin, ran, begin
        )
        return loss

    @property
    def _direction(self) -> Direction:
        return Direction(self.optimizer.seed, self._step)

    def _play(self, begin: float) -> list[Ran]:
        try:
            ran = self.engine.play(self.loaded, begin)
        except BaseException:
            self._torn = self._due is not None
            raise
        self._due = None
        return ran

    def lose(self, stage: int, microbatch: int) -> None:
        """A stage forward, with the weights on a side of what they are, or as they are."""
        sign = self._signs[microbatch]
        self._perturbed.enter(stage, sign, self._direction, self.optimizer.epsilon)
        self._walks[microbatch].forward(stage)

    def change(self, stage: int) -> None:
        """UPDATE by what the step before has found, now that the stage's weights are here."""
        if self._due is None:
            return
        for index in self.placement.chunks.of_stage[stage]:
            if self.learns[index]:
                self._due.apply(self.placement.chunks.tables[index], self.chunks[index].parameters)

    def forget(self) -> None:
        """A step or an evaluation has failed."""
        self._walks.clear()

    # -- evaluation and state ---------------------------------------------------------------------

    @torch.no_grad()
    def catch_up(self) -> None:
        """Give the weights what the last step has found: a pass over all of them."""
        due, self._due = self._due, None
        if due is not None:
            self._held.change(due.apply)

    @torch.no_grad()
    def evaluate(self, batch: Any, rows: int) -> tuple[float, float]:
        """Sum of losses over a batch of `rows` rows, and the weight of its valid targets."""
        self.catch_up()
        size = self.plan.microbatch_rows
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        parts = [self.flow.part(batch, *cut) for cut in cuts]
        program = evaluate(self.placement, len(parts))
        prove(program)
        self._set_out([self.flow.begin(part, 1.0) for part in parts])
        self.engine.play(self._playable(program.own), time.perf_counter())
        return float(torch.stack(self._losses()).sum()), float(self.flow.count(batch)[0])

    def _set_out(self, walks: Sequence[Walk]) -> None:
        """Set out on passes with the weights as they are."""
        self._walks, self._signs = list(walks), [NONE] * len(walks)
        self._perturbed.begin()

    @cached_property
    def tokens(self) -> TokenSteps:
        """Steps of generation by its engine; see Job.tokens."""

        def begin(walk: Walk, shapes: tuple[int, int]) -> None:
            self.catch_up()
            self._set_out([walk])

        playable = proved(self.placement, self._playable)
        return TokenSteps(native(self.flow), self.engine, self._sample, playable, begin)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name as it is held, all steps included; see Job.weights."""
        self.catch_up()
        return self._held.weights()

    @property
    def weights_dtype(self) -> torch.dtype:
        """What training continues from is held in."""
        return self.placement.chunks.kept.dtypes.parameters

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self.owners[name].shape)

    def form(self, name: str, state: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Of an optimizer state, of which there are none."""
        raise AssertionError(f"{name} has no state {state}")

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

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Go on from there; the weights were loaded before."""
        self._step, self._torn = max(counts.values(), default=0), False


class Losing:
    """UPDATE of a job without gradients, and what goes forward."""

    kinds = (Kind.UPDATE, *AHEAD)

    def __init__(self, job: ZerothJob) -> None:
        self._job = job

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        if action.kind is Kind.UPDATE:
            return Deed(partial(self._job.change, action.stage))
        return Deed(partial(self._job.lose, action.stage, action.microbatch))

    def begin(self, points: Points) -> None:
        """The walks are there."""

    def reset(self) -> None:
        self._job.forget()
