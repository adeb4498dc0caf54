"""Local learning: groups of blocks that learn by losses of their own, one group at a time.

No gradient passes between groups, so the activations of one group exist at once, beside the hidden
states that are handed on. Every group but the last has an auxiliary network with a norm and a head,
which gives it a next-token loss; that network may hold a moving average of the next group's first
block, which tells a group what the next one will make of its output (Su et al., "Momentum Auxiliary
Network for Supervised Local Learning", 2024; plain local learning: Belilovsky et al., "Decoupled
Greedy Learning of CNNs", 2020).

A group is a Job like any other: each makes its whole step, clipped by its own norm and updated,
before the next one begins. The average moves when its group has stepped and the next has not.

    job = LocalJob(model, plan, AdamW(lr))   # plan.approximate: [local-learning], plan.local
    loss = job.step(batch)                   # that of the last group, the model's own
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor, nn

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN, LossOptions
from outsize.memory import Meter
from outsize.memory.store import Store
from outsize.models.decoder import Decoder
from outsize.optim import Optimizer
from outsize.plan import Plan
from outsize.runtime.engine import Engine, Handler, Loaded, Ran
from outsize.runtime.generating import TokenSteps
from outsize.runtime.handlers.passes import Forward
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.job import Fill, Job, Report
from outsize.runtime.microbatches import Microbatches, nothing_leaves
from outsize.runtime.native import NativeFlow
from outsize.runtime.points import Points
from outsize.runtime.recipe import Recipe
from outsize.runtime.special.groups import AVERAGE, Auxiliary, Group, decoders, job_of, shifted
from outsize.runtime.storage.states import Stateful
from outsize.runtime.storage.together import Part, Together
from outsize.runtime.storage.weight_pool import NO_STORES
from outsize.runtime.watch import Watch
from outsize.schedule import Kind, Schedule, compile_forward, compile_tokens, prove
from outsize.schedule.compile.tokens import sampled
from outsize.schedule.layout import Placement

NAME = "local-learning"  # what `approximate` must name


class LocalJob(Stateful):
    """Trains a decoder group by group; used like Job.

    model: a native decoder whose head is its own. plan: of the whole model, with local-learning
    under approximate and `local` its settings. clip: largest gradient norm of each group. ledger,
    fill: as for Job. options: of every loss. Auxiliary networks begin as copies of the model's own
    blocks and head.
    """

    def __init__(
        self,
        model: Decoder,
        plan: Plan,
        optimizer: Optimizer,
        clip: float | None = None,
        ledger: Meter | None = None,
        fill: Fill | None = None,
        options: LossOptions = PLAIN,
    ) -> None:
        if NAME not in plan.approximate:
            raise OutsizeError(
                f"plan: approximate is {list(plan.approximate)}; losses of groups change the"
                f" maths: name {NAME} there"
            )
        if model.config.rewired:
            raise OutsizeError(
                f"{NAME}: groups end in plain blocks, but the model is wired as"
                f" {model.config.rewired} says; leave that out, or the approximation"
            )
        if model.config.adapter is not None:
            raise OutsizeError(
                f"{NAME}: each group learns with a head of its own, and beside an adapter all but"
                " the adapter is frozen; leave the adapter out, or the approximation"
            )
        self.plan, self.optimizer = plan, optimizer
        self.stores: Mapping[str, Store] = NO_STORES  # every group is on the device
        self.flow = NativeFlow(model, plan, options)
        named = dict(model.named_parameters())
        self.groups: list[Group] = []
        self.jobs: list[Job] = []
        self._ends: list[Auxiliary] = []
        values = fill or partial(_copied, named)
        recipe = Recipe(optimizer, clip)
        for group, decoder in decoders(model, plan):
            self.groups.append(group)
            self.jobs.append(job_of(group, decoder, plan, recipe, ledger, values, options))
            if isinstance(decoder.epilogue, Auxiliary):
                self._ends.append(decoder.epilogue)
        self.owners = {
            group.name(name): parameter
            for group, job in zip(self.groups, self.jobs, strict=True)
            for name, parameter in job.owners.items()
        }
        self.watch = Watch(ledger)
        self.microbatches = Microbatches(self.flow, self.watch, nothing_leaves, sent=False)
        stages, after = len(plan.stages), [self.microbatches.ending]
        forward = Forward(self.microbatches, stages)
        self._sample = Sample(lambda m: self.microbatches.of(m).loss)
        handlers: list[Handler] = [forward, self._sample]
        self.engine = Engine(handlers, self.flow.device, self.watch, after=after)
        self.loaded = self._playable(compile_forward(stages, 1))
        self._torn = False  # some groups have stepped and some have not
        with nullcontext() if ledger is None else ledger, torch.no_grad():
            self._averages = [self._average_of(index) for index in range(len(self._ends))]

    def _playable(self, made: Schedule) -> Loaded:
        """What goes forward through the whole model."""
        schedule = replace(made, first=made.stages)
        prove(schedule)
        uses = tuple((stage,) for stage in range(made.stages))
        return self.engine.load(schedule, Points(schedule, uses))

    @cached_property
    def tokens(self) -> TokenSteps:
        """Steps of generation by its engine; see Job.tokens."""
        stages, begin = len(self.plan.stages), self.microbatches.carry

        def playable(kind: Kind) -> Loaded:
            return self._playable(sampled(compile_tokens(stages, kind)))

        return TokenSteps(self.flow, self.engine, self._sample, playable, begin)

    def _average_of(self, index: int) -> dict[str, Tensor]:
        """The moving average by the names of the block's parameters: the parameters themselves, or
        copies as wide as what training continues from, for small changes would be lost."""
        average, read = self._ends[index].average, self.jobs[index + 1].weight_reader()
        wide = torch.promote_types(self.jobs[0].weights_dtype, torch.float32)
        return {
            name: p.data if p.dtype == wide else read(f"blocks.0.{name}").to(wide, copy=True)
            for name, p in (() if average is None else average.named_parameters())
        }

    # -- what it shares with a Job ----------------------------------------------------------------

    @property
    def ledger(self) -> Meter | None:
        """Counts bytes while it works."""
        return self.watch.ledger

    @ledger.setter
    def ledger(self, ledger: Meter | None) -> None:
        self.watch.ledger = ledger
        for job in self.jobs:
            job.ledger = ledger

    @property
    def placement(self) -> Placement:
        """Of the first group; all rest alike."""
        return self.jobs[0].placement

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters stay views of the chunks."""
        for job in self.jobs:
            job.close()
        self.engine.close()

    # -- one step ---------------------------------------------------------------------------------

    def step(self, batch: Batch, lr: float | None = None) -> Tensor:
        """Train every group on one batch; gives the mean loss of the last one, a scalar tensor.

        In `report`, norm is that of all groups' gradients together; `losses` has every group's.
        """
        begin = time.perf_counter()
        if self._torn:
            raise OutsizeError(
                "job: a step was cut off when some groups had made it; load a checkpoint to go on"
            )
        for job in self.jobs:
            job.method.check()
        ran: list[Ran] = []
        with self.handing():
            for index, job in enumerate(self.jobs):
                since = time.perf_counter() - begin
                loss = job.step(batch, lr)
                self._torn = True
                self._move(index)
                ran += shifted(job.report.ran, since, self._offset(index))
        self._torn = False
        reports = [job.report for job in self.jobs]
        self.losses = tuple(report.loss for report in reports)
        norm = sum(report.norm**2 for report in reports) ** 0.5
        seconds = time.perf_counter() - begin
        self.report = Report(reports[-1].loss, norm, reports[-1].count, seconds, ran, begin)
        return loss

    @contextmanager
    def handing(self) -> Iterator[None]:
        """A step: every group hands its outputs to the next."""
        for end in self._ends:
            end.handing = True
        try:
            yield
        finally:
            for end in self._ends:
                end.handing = False
                end.handed.clear()

    def _offset(self, index: int) -> int:
        return sum(len(job.plan.stages) for job in self.jobs[:index])

    @torch.no_grad()
    def _move(self, index: int) -> None:
        """Move a group's average towards the next group's first block, as it is now."""
        if index == len(self._ends) or not self._averages[index]:
            return
        read = self.jobs[index + 1].weight_reader()
        module = cast(nn.Module, self._ends[index].average)
        shown = dict(module.named_parameters())
        for name, mean in self._averages[index].items():
            mean.lerp_(read(f"blocks.0.{name}").to(mean.dtype), 1 - self.plan.local.momentum)
            if mean.data_ptr() != shown[name].data_ptr():
                shown[name].data.copy_(mean)

    # -- evaluation and state ---------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch, rows: int) -> tuple[float, float]:
        """Sum of losses of the whole model over a batch of `rows` rows, and the weight of its valid
        targets."""
        size, found = self.plan.microbatch_rows, list[Tensor]()
        for start in range(0, rows, size):
            self.ready(batch, start, min(start + size, rows))
            self.engine.play(self.loaded, time.perf_counter())
            found += self.microbatches.losses.values()
        self.microbatches.ready(None, (), 1.0)
        total = sum(torch.stack(found).double().tolist()) if found else 0.0
        return total, float(self.flow.count(batch)[0])

    def ready(self, batch: Batch, start: int, stop: int) -> None:
        """Set out on the evaluation of some rows; the batch of the step is let go."""
        for job in self.jobs:
            job.method.microbatches.ready(None, (), 1.0)
        self.microbatches.ready(batch, [(start, stop)], 1.0)

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; weights and states were loaded before."""
        super().restore_counts(counts)
        self._torn = False

    @cached_property
    def states(self) -> Together:
        """Those of all groups. The weights of auxiliary networks are states of the training."""
        parts = [
            Part(job, {local: group.name(local) for local in job.owners})
            for group, job in zip(self.groups, self.jobs, strict=True)
        ]
        averages = {
            group.name(f"epilogue.{AVERAGE}.{name}"): mean
            for group, means in zip(self.groups, self._averages, strict=False)
            for name, mean in means.items()
        }
        extra = frozenset(name for name in self.owners if name.startswith("auxiliary."))
        return Together(parts, extra, self.placement.chunks.kept.dtypes.optimizer, averages)


def _copied(named: Mapping[str, nn.Parameter], name: str, out: Tensor) -> None:
    out.copy_(named[name])
