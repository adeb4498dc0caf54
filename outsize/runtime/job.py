"""Job: a model under training. One `step` plays the plan's schedule over one batch."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outsize.collectives import along
from outsize.decode.generate import GREEDY
from outsize.decode.samplers import Sampler
from outsize.kernels.rows import alone
from outsize.memory import Meter
from outsize.models.cuts import NO_CUTS, Cut
from outsize.optim import taker
from outsize.parallel.whole import WholeTensors
from outsize.plan import Plan
from outsize.plan.spread import share
from outsize.runtime.checks import check, check_rate, check_same, check_weight, check_world
from outsize.runtime.engine import Engine, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.generating import Generated as Generated
from outsize.runtime.generating import TokenSteps, native
from outsize.runtime.method import Method, method_of
from outsize.runtime.microbatches import Carried
from outsize.runtime.points import Points
from outsize.runtime.recipe import ALONE, Here, Recipe
from outsize.runtime.report import Report as Report
from outsize.runtime.stage_links import StageLinks
from outsize.runtime.storage.shard_groups import ShardGroups
from outsize.runtime.storage.states import Fill as Fill
from outsize.runtime.storage.states import Stateful, States
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.runtime.totals import Totals
from outsize.runtime.watch import Watch
from outsize.schedule import Kind, Schedule, prove
from outsize.schedule.programs import evaluate, generating, most_groups


class Job(Stateful):
    """Holds the chunks of a model and plays schedules over them.

    flow: the model. plan: how a step runs. recipe: how it trains. here: what this worker has.
    cuts: which part of a parameter the model has here, where the tensor axis has several workers.
    fill: writes the whole values of the parameter of a name into a tensor, for parameters that have
    no memory of their own (outsize/models/build.py, `shells`).
    """

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        recipe: Recipe,
        here: Here = ALONE,
        cuts: Mapping[str, Cut] = NO_CUTS,
        fill: Fill | None = None,
    ) -> None:
        self.flow, self.plan, self.recipe, self.optimizer = flow, plan, recipe, recipe.optimizer
        self.world, self.stores, self.rows = here.world, here.stores, flow.rows
        self.watch = Watch(here.ledger, here.at)
        check_world(plan, self.world, cuts)
        check(flow, plan, recipe)
        self.owners = {name: p for _, params in flow.segments for name, p in params}
        self.trainable = frozenset(n for n, p in self.owners.items() if p.requires_grad)
        self.place = plan.mesh.rows_index(self.world.rank)
        method_of(plan.approximate).freeze(flow, plan, recipe)
        self._made = here, cuts
        self._lay_out(fill)

    def _lay_out(self, fill: Fill | None) -> None:
        """Place the states of what is trained, and make their buffers and lists."""
        (here, cuts), flow, plan = self._made, self.flow, self.plan
        method = method_of(plan.approximate)
        self.placement = method.placement(flow, plan, self.recipe, here, cuts)
        self.program = method.program(flow, self.placement)
        prove(self.program)
        device = next(iter(self.owners.values())).device
        chunks, kind, line = self.placement.chunks, self.watch.kind, along(self.world, "pipeline")
        self.totals, self.shard_groups = Totals(self.world, chunks), ShardGroups(self.world, chunks)
        check_same(self.placement, line)
        self.whole_tensors = WholeTensors(cuts, self.world)
        self.stage_links: StageLinks | None = None
        if chunks.pipelining is not None:
            self.stage_links = StageLinks(self.world, chunks, device, kind, self.rows)
        with self.watch.on():
            self.weight_pool = WeightPool(
                self.placement, self.stores, device, kind, self.shard_groups
            )
            self.held = States(self.weight_pool, self.whole_tensors, self.owners, line)
            self.held.adopt(fill)
        self.chunks = self.weight_pool.chunks
        self.method: Method = method(self)
        self.engine: Engine = self.method.engine
        if plan.precision.invariant:
            self.engine.within = alone
        self.loaded = self.playable(self.program.own)
        self._evaluations: dict[int, Loaded] = {}
        self.evaluated: Sequence[Ran] = ()  # the actions that evaluated last
        self.__dict__.pop("tokens", None)

    def anew(self, trained: Collection[str]) -> None:
        """Train other parameters from here on; where all states rest on the device, and whole
        parameters with them. What goes on has the states that it had, what begins the optimizer's
        first ones, and what ends none. Every worker calls it."""
        goes_on = {n for n, p in self.owners.items() if p.requires_grad and n in trained}
        states = self.optimizer_state()
        kept = {name: s.clone() for name, s in states if name.rpartition(".")[0] in goes_on}
        counts, notes = self.update_counts(), self.method.notes()
        self.method.settle(shown=True)
        self.close()
        del self.method, self.engine, self.loaded, self.chunks, self.held, self.weight_pool
        gc.collect()  # what refers to itself goes now, and its buffers with it
        for name, parameter in self.owners.items():
            parameter.requires_grad_(name in trained)
        self._lay_out(None)

        both = (taker(self.optimizer, main) for main in (False, True))
        initial = {spec.name: spec.initial for one in both for spec in one.states}

        def give(name: str, out: Tensor) -> None:
            if name in kept:
                out.copy_(kept[name])
            else:
                out.fill_(initial[name.rpartition(".")[2]])

        self.load(None, give)
        self.restore_counts({name: n for name, n in counts.items() if name in goes_on})
        self.method.recall(notes)

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

    @property
    def states(self) -> States | Stateful:
        """Of the weights after all steps made so far."""
        self.method.settle()
        return self.method.stated(self.held)

    def playable(self, schedule: Schedule) -> Loaded:
        """A list that the job's engine can play: one that `prove` has passed, over the same
        rooms."""
        uses, behind = self.placement.items.residency.uses, self.plan.update == "behind"
        return self.engine.load(schedule, Points(schedule, uses, behind))

    def close(self) -> None:
        """Give the model back as an ordinary module; its parameters stay views of the chunks.

        Of what rests below the device, the parameters have the values that happen to be in the
        pool, and of stages on other workers none: read `weights` before.
        """
        self.method.close()
        self.engine.close()
        if self.stage_links is not None:
            self.stage_links.close()

    def step(self, batch: Any, lr: float | None = None, rows: int | None = None) -> Tensor:
        """Train on one batch; gives the mean loss over its valid targets, a scalar tensor.

        lr: this step's learning rate; the optimizer's own where none is given. rows: of this
        worker's batch; the plan's where none are said. `report` tells more.
        """
        begin = time.perf_counter()
        check_rate(lr)
        self.method.check()
        others = self.method.due()
        if others is not None:
            self.anew(others)
        weight, count = self.totals.count(self.flow.count(batch))
        check_weight(weight)
        self.ready(batch, weight, lr, rows)
        ran = self.method.play(self.loaded, begin)
        loss, norm = self.method.found()
        if self.ledger is not None:
            self.ledger.release(loss)  # the caller may keep it
        seconds = time.perf_counter() - begin
        scaling = self.method.scaling
        self.report = Report(float(loss), norm, count, seconds, ran, begin, scaling)
        return loss

    def ready(
        self, batch: Any, count: float, lr: float | None = None, rows: int | None = None
    ) -> None:
        """Set out on a step: its batch, the one number that losses are divided by, its rate and its
        rows."""
        numbers, (first, last) = range(self.plan.microbatches), self.plan.rows_at(self.place)
        cuts = [self.plan.rows_of(m, self.place) for m in numbers]
        if rows not in (None, last - first):
            cuts = [share(rows, len(numbers), m) for m in numbers]
        self.method.ready(batch, cuts, 1.0 / count, lr)

    @torch.no_grad()
    def evaluate(self, batch: Any, rows: int) -> tuple[float, float]:
        """Sum of losses over a batch of `rows` rows, and the weight of its valid targets (their
        count, where they have none); of all workers' batches, of one row at least each."""
        self.method.settle(shown=True)
        size, found = self.plan.microbatch_rows if self.flow.splits else rows, list[Tensor]()
        cuts = [(start, min(start + size, rows)) for start in range(0, rows, size)]
        # A pipeline is full of microbatches, and what workers gather they gather as often, whatever
        # rows each has. What streams passes once for those that a step has at once in a stage, so
        # that they hold no more than a step's.
        layers = self.placement.rooms and self.plan.order == "layer"
        count = self.plan.microbatches if layers else 1
        alike = self.stage_links is not None or self.placement.items.residency.gathered
        own = len(cuts)
        cuts += cuts[-1:] * (self.totals.most(own) - own)  # for others' experts, and not counted
        count = max(1, len(cuts)) if alike else count
        for first in range(0, len(cuts), count):
            found += self._losses(batch, cuts[first : first + count], own - first)
        total = sum(torch.stack(found).double().tolist()) if found else 0.0
        return self.totals.evaluated(total, float(self.flow.count(batch)[0]))

    def _losses(self, batch: Any, cuts: Sequence[tuple[int, int]], own: int) -> list[Tensor]:
        """Of the microbatches that this worker books; the first `own` of them count."""
        if len(cuts) not in self._evaluations:
            program = evaluate(self.placement, len(cuts))
            prove(program)
            self._evaluations[len(cuts)] = self.playable(program.own)
        microbatches = self.method.microbatches
        microbatches.ready(batch, cuts, 1.0)
        self.evaluated = self.engine.play(self._evaluations[len(cuts)], time.perf_counter())
        losses = [loss for m, loss in sorted(microbatches.losses.items()) if m < own]
        microbatches.ready(None, (), 1.0)
        microbatches.reset()
        return losses

    @cached_property
    def tokens(self) -> TokenSteps:
        """Steps of generation by its engine. OutsizeError where the model is no native decoder."""

        def begin(begun: Carried) -> None:
            self.method.settle(shown=True)
            self.method.microbatches.carry(begun)

        def playable(kind: Kind, groups: int, steps: int) -> Loaded:
            return self.playable(generating(self.placement, kind, groups, steps))

        return TokenSteps(
            native(self.flow), self.engine, self.method.sample, playable, begin,
            most_groups(self.placement),
        )  # fmt: skip

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_tokens: int,
        sampling: Sampler | Sequence[Sampler] = GREEDY,
        stop: Collection[int] = (),
        logprobs: bool = False,
    ) -> list[Generated]:
        """What follows each of the prompts, ids of tokens, with the weights as they are: at most
        `max_tokens` of them, the last one a token of `stop` if one was drawn. All workers call it
        with the same prompts and have the same answer; the next step is what it would have been.

        sampling: for all prompts, or one each. logprobs: with the log of the probability that the
        model gave each token. OutsizeError as of outsize.decode.generate, and where the model is no
        native decoder.
        """
        return self.tokens.generate(prompts, max_tokens, sampling, stop, logprobs)

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Set the updates that each parameter has had; the weights were loaded before."""
        super().restore_counts(counts)
        self.method.mend()
