"""Zeroth-order fine-tuning: two losses a step in place of a backward pass, on weights that stream.

The loss is taken at w + eps z and at w - eps z for one random direction z. The difference over
2 eps is the slope along z, and w moves by -lr * slope * z (Malladi et al., "Fine-Tuning Language
Models with Just Forward Passes" (MeZO), 2023). There are no gradients, no optimizer states and no
kept activations, so the weights are all there is, and they can rest on any tier.

Both losses pass through a block while it is present, and a block takes the update of step t when it
comes by in step t + 1, so weights are fetched and written once a step (Wang et al., "ZO2", 2025).
Here that is a Schedule of UPDATE and FORWARD: the same pool, rooms and lanes as everywhere.

    job = Job(flow, plan, Recipe(Zeroth(lr=1e-6)))   # plan.approximate: [zeroth-order]
    loss = job.step(batch)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN
from outsize.memory import tables
from outsize.models.cuts import Cut
from outsize.models.declared import declared_rates
from outsize.plan import Plan
from outsize.runtime.checks import check_trained, dtypes_of
from outsize.runtime.engine import Deed, Engine, Handler, Hook, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.copies import Copies
from outsize.runtime.handlers.links import Links
from outsize.runtime.handlers.norm import Diverged
from outsize.runtime.handlers.passes import nothing_comes
from outsize.runtime.handlers.states import Arrivals, Movement
from outsize.runtime.handlers.training import sampling
from outsize.runtime.method import Method
from outsize.runtime.microbatches import Microbatches, nothing_leaves
from outsize.runtime.points import Points
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.forwards import NAME, Zeroth, still
from outsize.runtime.special.perturb import MINUS, NONE, PLUS, Direction, Move, Perturbed
from outsize.runtime.storage.update import updated_weights
from outsize.schedule import Action, Kind
from outsize.schedule.compile import zeroth as compiled
from outsize.schedule.kept import PARAMETERS
from outsize.schedule.layout import Placement
from outsize.schedule.program import Program
from outsize.schedule.programs import program_of

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.making import Trainable


DRAWN = 26e6  # normal numbers a second of one core (docs/log.md)


class Losses(Method):
    """Steps of losses alone: see outsize/runtime/method.py. They are made without dropout: both
    losses must be of one function.

    Of the plan, its parameters' tiers, stream, rows and precision are used; with a master copy, the
    weights are held as that is, and the model computes on roundings of them. learns: by chunk,
    whether it is trained. slope: along the direction of the last step. torn: some weights have had
    a step's update and some have not.
    """

    rehearsed = False

    def __init__(self, job: Job) -> None:
        settings = job.optimizer
        assert isinstance(settings, Zeroth)
        self._job, self._settings = job, settings
        self._chunks = job.placement.chunks
        self.learns = learning(job.flow, job.placement)
        self._runs = {name: job.whole_tensors.runs(name) for name in job.owners}
        extents = (self._chunks.extent(c, PARAMETERS) for c in range(len(self._chunks.tables)))
        self._first = [first for first, _ in extents]  # by chunk, of the elements updated here
        self._trained = [(name, p, p.requires_grad) for name, p in job.owners.items()]
        every = replace(self._chunks, uses=tuple(map(tuple, job.flow.uses)))
        uses = [every.stage_uses(stage) for stage in range(len(job.plan.stages))]
        compute = dtypes_of(job.plan.precision).parameters
        with job.watch.on():
            self._perturbed = Perturbed(
                job.weight_pool, job.owners, self.learns, uses, compute, job.watch.kind
            )
        device = job.weight_pool.device if job.placement.items.apart else None
        stage_links = job.stage_links
        sent = stage_links is not None
        self.microbatches = Microbatches(job.flow, job.watch, nothing_leaves, sent, device)
        self._hand = nothing_comes if stage_links is None else stage_links.hand
        self.sample = sampling(job, self.microbatches)
        moves = Arrivals(job.weight_pool), Movement(job.weight_pool)
        handlers: list[Handler] = [Losing(self), *moves, self.sample]
        if device is not None:
            handlers.append(Copies(self.microbatches, device, job.watch))
        before: list[Hook] = []
        if stage_links is not None:
            links = Links(stage_links, self.microbatches)
            handlers.append(links)
            before.append(links.sweep)
        after = [self.microbatches.ending]
        self.engine = Engine(handlers, job.weight_pool.device, job.watch, before, after)
        self._due: Move | None = None
        self.torn = False
        self._rate = self.slope = 0.0
        self._lost: dict[int, Tensor] = {}  # losses of a step, of all microbatches by either sign
        self._found = 0.0, 0.0  # of a step, on either side of the weights, over all workers

    @staticmethod
    def recipe(said: Recipe) -> Recipe:
        own, usual = said.of(NAME), said.optimizer
        if said.rates:
            raise OutsizeError(
                f"optimizer.rates is {dict(said.rates)}, and {NAME} moves all weights along one"
                " direction; leave it out"
            )
        return Recipe(Zeroth(usual.lr, own.epsilon, usual.weight_decay, said.seed))

    @staticmethod
    def adapted(model: Trainable, plan: Plan, recipe: Recipe) -> tuple[Trainable, Plan]:
        if getattr(model, "options", PLAIN) != PLAIN:
            raise OutsizeError(
                "zeroth-order: train.label_smoothing and train.z_loss change gradients, and there"
                " are none; set both to 0"
            )
        return model, plan

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        """Where the weights rest."""
        if not isinstance(recipe.optimizer, Zeroth):
            raise OutsizeError(
                f"plan: approximate holds {NAME}, whose steps the optimizer of this job does not"
                " make; use outsize.runtime.special.forwards.Zeroth, or leave the name out"
            )
        if any(rate != 1 for rate in declared_rates(flow.model).values()):
            raise OutsizeError(
                f"model: some parameters declare a learning rate of their own, and {NAME} moves all"
                " weights along one direction; leave what declares it out, or the approximation"
            )
        named = [params for _, params in flow.segments]
        group_of = {name: 0 for params in named for name, _ in params}
        layout = tables(named, group_of, flow.wide, cuts=cuts)
        if not any(table.trainable for table in layout):
            raise OutsizeError("model: no parameter requires a gradient; nothing to train")
        rank = here.world.rank
        places = plan.mesh.index("data", rank), plan.mesh.index("pipeline", rank)
        return compiled.placement_of(plan, layout, flow.uses, places, here.copies(flow.model))

    @staticmethod
    def program(flow: Flow, placement: Placement) -> Program:
        trained = _trained(flow)
        return program_of(placement, lambda here: compiled.step_of(here, trained), True)

    # -- a step -----------------------------------------------------------------------------------

    def check(self) -> None:
        if self.torn:
            raise OutsizeError(
                "job: a step was cut off while it updated the weights; load a checkpoint to go on"
            )
        check_trained(self._trained)

    def ready(
        self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float, lr: float | None
    ) -> None:
        self.microbatches.ready(batch, [*cuts, *cuts], factor)
        self._rate = self._settings.lr if lr is None else lr

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        with torch.no_grad(), still(self._job.flow.model):
            ran = self.engine.play(step, begin)
        self._due = None
        return ran

    def found(self) -> tuple[Tensor, float]:
        """The mean of the two losses, and the slope along the direction."""
        plus, minus = self._found
        slope = (plus - minus) / (2 * self._settings.epsilon)
        if not math.isfinite(slope):
            raise Diverged(
                f"loss is {plus} and {minus} on either side of the weights; expected"
                " finite numbers: lower the learning rate or check the data; the weights were left"
                " unchanged"
            )
        self.slope, made = slope, self._made()
        decay = self._rate * self._settings.weight_decay
        self._due = Move(self._direction_of(made), -self._rate * slope, decay)
        for chunk, learns in zip(self._job.chunks, self.learns, strict=True):
            if learns:
                chunk.steps = {slot.name: made + 1 for slot in chunk.table.slots}
        return torch.tensor((plus + minus) / 2, dtype=torch.float64), abs(slope)

    def _direction_of(self, step: int) -> Direction:
        return Direction(self._settings.seed, step, self._runs.__getitem__)

    def _made(self) -> int:
        """The steps so far, which name the next direction."""
        return max((n for chunk in self._job.chunks for n in chunk.steps.values()), default=0)

    # -- its actions ------------------------------------------------------------------------------

    def begin(self, points: Points) -> None:
        self.microbatches.begin(points)
        self._perturbed.begin()
        self._lost.clear()
        self._direction = self._direction_of(self._made())

    def reset(self) -> None:
        self.torn = self.torn or self._due is not None
        self.microbatches.reset()

    @torch.no_grad()
    def lose(self, action: Action, sign: int) -> None:
        """A stage forward, with the weights on a side of what they are, or as they are."""
        stage, m = action.stage, action.microbatch
        self._perturbed.enter(stage, sign, self._direction, self._settings.epsilon)
        walk = self.microbatches.of(m)
        self._hand(action, walk)
        walk.forward(stage)
        if action.kind is Kind.LOSS:
            assert walk.loss is not None
            if sign == NONE:
                self.microbatches.lose(m, walk.loss)
            else:
                self._lost[m] = walk.loss

    def agree(self) -> None:
        """NORM: the losses on either side, summed over the workers."""
        losses = [loss.double() for _, loss in sorted(self._lost.items())]
        mine, half = torch.stack(losses).tolist() if losses else [], len(losses) // 2
        plus, minus = self._job.totals.losses([sum(mine[:half]), sum(mine[half:])])
        self._found = plus, minus

    def change(self, stage: int) -> None:
        """UPDATE by what the step before has found, now that the stage's weights are here."""
        if self._due is None:
            return
        for index in self._chunks.of_stage[stage]:
            if self.learns[index]:
                flat = updated_weights(self._job.weight_pool, index)
                self._due.apply(self._chunks.tables[index], flat, self._first[index])

    # -- the weights ------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, shown: bool = False) -> None:
        """A pass over all weights, where the last step has found what they have not had yet."""
        due, self._due = self._due, None
        if due is None or self.torn:
            return
        pool = self._job.weight_pool
        for index, table in enumerate(self._chunks.tables):
            if self.learns[index]:
                flat = pool.mine(index, PARAMETERS)
                due.apply(table, flat, self._first[index])
                pool.write(index, PARAMETERS, flat)

    def seconds(self, action: Action) -> float:
        """Of the normal numbers that it draws: two for every weight and step."""
        draws = action.kind is Kind.UPDATE or not action.microbatch
        chunks = self._chunks.of_stage[action.stage] if draws else ()
        return sum(self._chunks.tables[c].numel for c in chunks if self.learns[c]) / DRAWN

    def mend(self) -> None:
        self.torn = False

    def close(self) -> None:
        """The parameters are the weights as they are held."""
        self.settle()
        for chunk in self._job.chunks:
            for slot in chunk.table.slots:
                self._job.owners[slot.name].data = slot.of(chunk.parameters)
        self._job.flow.attach(None)


def learning(flow: Flow, placement: Placement) -> tuple[bool, ...]:
    """By chunk, whether it is trained."""
    trained = _trained(flow)
    return tuple(table.slots[0].name in trained for table in placement.chunks.tables)


def _trained(flow: Flow) -> frozenset[str]:
    return frozenset(n for _, params in flow.segments for n, p in params if p.requires_grad)


class Losing:
    """UPDATE and NORM of a job without gradients, and what goes forward."""

    kinds = (Kind.UPDATE, Kind.FORWARD, Kind.LOSS, Kind.PREFILL, Kind.DECODE, Kind.NORM)

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self.begin, self.reset = losses.begin, losses.reset

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        if action.kind is Kind.UPDATE:
            return Deed(partial(self._losses.change, action.stage))
        if action.kind is Kind.NORM:
            return Deed(self._losses.agree)
        half = points.schedule.microbatches // 2
        sign = NONE if points.evaluates else PLUS if action.microbatch < half else MINUS
        return Deed(partial(self._losses.lose, action, sign))
