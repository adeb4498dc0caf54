"""What a training step and an evaluation are made of: the handlers of a job, and their engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from outsize.runtime.engine import Engine, Handler, Hook
from outsize.runtime.generating import drawer
from outsize.runtime.handlers.links import Links
from outsize.runtime.handlers.norm import Norm
from outsize.runtime.handlers.passes import Passes, nothing_comes
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.handlers.spill import Spilling
from outsize.runtime.handlers.states import Movement
from outsize.runtime.handlers.update import Update
from outsize.runtime.handlers.vocabulary import Vocabulary
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.spill import Spills
from outsize.runtime.totals import Totals
from outsize.schedule import State

if TYPE_CHECKING:
    from outsize.runtime.job import Job


class Training:
    """The handlers of a job whose states and subsystems are there. clip: the largest norm."""

    def __init__(self, job: Job, spills: Spills, totals: Totals, clip: float | None) -> None:
        watch, weight_pool, gradients = job.watch, job.weight_pool, job.gradients
        passing, rows = job.passing, job.rows
        self.spilling = Spilling(spills, job.plan, job.stores, watch)
        self.microbatches = Microbatches(
            job.flow, watch, self.spilling.of, sent=passing is not None
        )
        self.norm = Norm(
            weight_pool, self.microbatches, gradients, job.updates, totals, clip, watch
        )
        self.update = Update(job.updates, gradients, self.norm, totals)
        movement = Movement(weight_pool)
        hand = nothing_comes if passing is None else passing.hand
        stages = len(job.plan.stages)
        self.passes = Passes(self.microbatches, gradients, self.spilling, stages, hand)
        self.sample = self._sampling(job, totals)
        handlers: list[Handler] = [
            self.passes, movement, self.spilling, self.norm, self.update, self.sample
        ]  # fmt: skip
        before: list[Hook] = [movement.anew]
        if rows is not None:
            counts = not job.placement.chunks.turn
            handlers.append(Vocabulary(rows, self.microbatches, counts))
        if passing is not None:
            links = Links(passing, self.microbatches)
            handlers.append(links)
            before.insert(0, links.sweep)
        after: list[Hook] = [self.norm.completing, self.microbatches.ending]
        self.engine = Engine(handlers, weight_pool.device, watch, before, after)

    def _sampling(self, job: Job, totals: Totals) -> Sample:
        """One worker draws: the first of those that have the last stage."""
        root, rows = drawer(job.placement), job.rows

        def logits(m: int) -> Tensor | None:
            return self.microbatches.of(m).loss if rows is None else rows.take(State.SUMS, m)

        return Sample(logits, job.world.rank == root, partial(totals.told, root))
