"""A step of one forward and one backward pass: its states, its list, its handlers, their engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outsize.errors import OutsizeError
from outsize.memory import tables
from outsize.memory.store import Addressed
from outsize.models.cuts import Cut
from outsize.optim import taker
from outsize.plan import Plan
from outsize.runtime.checks import (
    check_pipeline,
    check_trained,
    dtypes_of,
    grains_of,
    grouped,
    taken_by,
)
from outsize.runtime.engine import Engine, Handler, Hook, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.copies import Copies
from outsize.runtime.handlers.links import Links
from outsize.runtime.handlers.norm import Norm
from outsize.runtime.handlers.passes import Backward, Forward, nothing_comes
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.handlers.spill import Spilling
from outsize.runtime.handlers.states import Arrivals, Movement
from outsize.runtime.handlers.update import Update
from outsize.runtime.loss_scale import NOTES, LossScale, recalled
from outsize.runtime.method import Method, Notes
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.spill import Spills
from outsize.runtime.storage.apart import Shown
from outsize.runtime.storage.gradients import Gradients
from outsize.runtime.storage.update import Updates
from outsize.runtime.wrapped import wrapped
from outsize.schedule import State
from outsize.schedule.chunks import Chunks
from outsize.schedule.items import Items
from outsize.schedule.kept import Kept
from outsize.schedule.layout import Placement
from outsize.schedule.program import Program
from outsize.schedule.programs import drawer, train

if TYPE_CHECKING:
    from outsize.runtime.job import Job


class Training(Method):
    """Steps of one forward and one backward pass. See outsize/runtime/method.py. A parameter that
    stops to require a gradient is left as it is until it does again."""

    def __init__(self, job: Job) -> None:
        watch, weight_pool, stage_links, recipe = (
            job.watch,
            job.weight_pool,
            job.stage_links,
            job.recipe,
        )
        _, groups = grouped(job.flow, recipe)
        self._optimizer, self._flow, self._pool = recipe.optimizer, job.flow, weight_pool
        self.updates = Updates(weight_pool, recipe.optimizer, groups, job.whole_tensors)
        self._shown = Shown(weight_pool, recipe.optimizer)
        self.gradients = gradients = Gradients(job.chunks, job.owners)
        job.flow.attach(gradients)
        spills = Spills((weight_pool.pool, *(chunk.parameters for chunk in job.chunks)))
        self._wrapped = list(wrapped(job.flow, job.plan, spills))
        self._frozen = [(n, p, False) for n, p in job.owners.items() if not p.requires_grad]
        self.spilling = Spilling(spills, job.plan, job.stores, watch)
        device = weight_pool.device if job.placement.items.apart else None
        self.microbatches = Microbatches(
            job.flow, watch, self.spilling.of, stage_links is not None, device
        )
        self.norm = Norm(
            weight_pool, self.microbatches, gradients, self.updates, job.totals, recipe.clip, watch
        )
        self.norm.scaling = LossScale() if job.plan.precision.scaled else None
        self.update = Update(self.updates, gradients, self.norm, job.totals)
        movement = Movement(weight_pool, self.norm.square)
        hand = nothing_comes if stage_links is None else stage_links.hand
        self.backward = Backward(self.microbatches, gradients, spills, hand)
        self.sample = sampling(job, self.microbatches)
        handlers: list[Handler] = [
            Forward(self.microbatches, hand), self.backward, Arrivals(weight_pool), movement,
            self.spilling, self.norm, self.update, self.sample,
        ]  # fmt: skip
        if device is not None:
            handlers.append(Copies(self.microbatches, device, watch))
        before: list[Hook] = [movement.anew]
        if job.rows is not None:
            handlers.append(job.rows.handler(self.microbatches, not job.placement.chunks.turn))
        if stage_links is not None:
            links = Links(stage_links, self.microbatches)
            handlers.append(links)
            before.insert(0, links.sweep)
        after: list[Hook] = [self.norm.completing, self.microbatches.ending]
        self.engine = Engine(handlers, weight_pool.device, watch, before, after)

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        """Where weights, gradients and optimizer states rest."""
        optimizer, named = recipe.optimizer, [params for _, params in flow.segments]
        group_of, _ = grouped(flow, recipe)
        layout = tables(
            named, group_of, flow.wide, taken_by(flow, optimizer, cuts), cuts, grains_of(optimizer)
        )
        memory = frozenset(n for n, s in here.stores.items() if isinstance(s, Addressed))
        rest, main = (taker(optimizer, main).states for main in (False, True))
        place, turn = (plan.mesh.index(axis, here.world.rank) for axis in ("data", "pipeline"))
        kept, uses = Kept(dtypes_of(plan.precision), rest, main), tuple(map(tuple, flow.uses))
        mine = Chunks(plan, layout, uses, kept, place, turn, here.lying)
        made = Placement(Items(mine, memory, here.copies(flow.model)))
        check_pipeline(made)
        if made.chunks.first == len(plan.stages):
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        return made

    @staticmethod
    def program(flow: Flow, placement: Placement) -> Program:
        return train(placement)

    def check(self) -> None:
        self.update.check()
        check_trained(self._frozen)

    def ready(
        self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float, lr: float | None
    ) -> None:
        if self.gradients.left():
            self._pool.forget()  # rooms of gradients are there for other states too
        self._shown.show(kept=False)
        scale = 1.0 if self.norm.scaling is None else self.norm.scaling.factor
        self.microbatches.ready(batch, cuts, factor * scale)
        self.update.lr = self._optimizer.lr if lr is None else lr

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        return self.engine.play(step, begin)

    def found(self) -> tuple[Tensor, float]:
        assert self.microbatches.loss is not None
        return self.microbatches.loss, self.norm.value

    @property
    def scaling(self) -> LossScale | None:
        return self.norm.scaling

    def notes(self) -> Notes:
        return {} if self.scaling is None else {NOTES: self.scaling.notes()}

    def recall(self, notes: Mapping[str, Any]) -> None:
        if self.scaling is not None:
            self.norm.scaling = recalled(notes)

    def settle(self, shown: bool = False) -> None:
        if shown:
            self._shown.show(kept=True)

    def mend(self) -> None:
        self.update.torn = False
        self._shown.make(kept=False)

    def close(self) -> None:
        if self._shown.alone:
            self.settle(shown=True)
        for undo in reversed(self._wrapped):
            undo()
        self._flow.attach(None)
        self.gradients.close()


def sampling(job: Job, microbatches: Microbatches) -> Sample:
    """One worker draws: the first of those that have the last stage."""
    root, rows = drawer(job.placement), job.rows

    def logits(m: int) -> Tensor | None:
        return microbatches.of(m).loss if rows is None else rows.take(State.SUMS, m)

    return Sample(logits, job.world.rank == root, partial(job.totals.told, root))
