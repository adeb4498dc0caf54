"""Local learning: groups of blocks that learn by losses of their own, one group at a time.

No gradient passes between groups, so the activations of one group exist at once, beside the hidden
states that are handed on. Every group but the last has an auxiliary network with a norm and a head,
which gives it a next-token loss; that network may hold a moving average of the next group's first
block, which tells a group what the next one will make of its output (Su et al., "Momentum Auxiliary
Network for Supervised Local Learning", 2024; plain local learning: Belilovsky et al., "Decoupled
Greedy Learning of CNNs", 2020).

The step is one Program: each group makes its whole step, clipped by its own norm and updated,
before the next one begins. The average moves when its group has stepped and the next has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.models.cuts import Cut
from outsize.plan import Local, Plan
from outsize.runtime.engine import Call, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.native import AUXILIARY, NativeFlow
from outsize.runtime.points import Points
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.groups import AVERAGE, Auxiliary, grouped
from outsize.runtime.storage.states import Fill, Stateful, States
from outsize.runtime.storage.update import updated_weights
from outsize.schedule import Action, Kind
from outsize.schedule.layout import Placement
from outsize.schedule.program import Program
from outsize.schedule.programs import train

if TYPE_CHECKING:
    from outsize.runtime.job import Job

NAME = "local-learning"
VALUE = "value"  # what the weights of parameters that are no part of the model are called


class Groups(Training):
    """Steps of groups: see outsize/runtime/method.py. Each group's norm is read before its update,
    which a norm that is no number refuses."""

    rehearsed = False
    adapted = staticmethod(grouped)

    @staticmethod
    def planned(plan: Plan, recipe: Recipe) -> Plan:
        own = recipe.of(NAME)
        return replace(plan, local=Local(own.groups, own.auxiliary, own.momentum))

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.engine.around |= {Kind.NORM: self._norm, Kind.UPDATE: self._update}
        self._job = job
        assert isinstance(job.flow, NativeFlow)
        self._heads = [head for head in job.flow.heads.values() if isinstance(head, Auxiliary)]
        self._ends = [i - 1 for i in cuts_of(job.flow, job.placement)]
        self._made: list[tuple[Tensor, float]] = []  # loss and norm of the groups so far
        self._losses: Callable[[], list[float]] = list
        tables = enumerate(job.placement.chunks.tables)
        self._slots = {slot.name: (i, slot) for i, table in tables for slot in table.slots}
        with job.watch.on(), torch.no_grad():
            self._averages = [self._average_of(head) for head in self._heads]

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        if not flow.aside:
            raise OutsizeError(
                "plan: approximate holds local-learning, and the model has no auxiliary networks;"
                " make its job with outsize.runtime.making.make_job"
            )
        made = Training.placement(flow, plan, recipe, here, cuts)
        return replace(made, cuts=tuple(cuts_of(flow, made)))

    @staticmethod
    def program(flow: Flow, placement: Placement) -> Program:
        return train(placement)

    # -- a step -----------------------------------------------------------------------------------

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        self._made.clear()
        return super().play(step, begin)

    def found(self) -> tuple[Tensor, float]:
        """The loss of the last group, which is the model's own, and the norm of all gradients."""
        self._losses = accelerator.later(torch.stack([loss for loss, _ in self._made]))
        loss, norm = self._made[-1][0], sum(norm**2 for _, norm in self._made) ** 0.5
        return loss, norm

    @property
    def losses(self) -> tuple[float, ...]:
        """Of each group, in the last step."""
        return tuple(self._losses())

    def _norm(self, run: Call, action: Action, points: Points) -> Call:
        """A group's loss is known, and the next one's begins."""

        def summed() -> None:
            run()
            loss, self.microbatches.loss = self.microbatches.loss, None
            assert loss is not None
            self._made.append((loss, self.norm.value))

        return summed

    def _update(self, run: Call, action: Action, points: Points) -> Call:
        """A group has stepped where its auxiliary network has."""
        if action.stage not in self._ends:
            return run
        index = self._ends.index(action.stage)

        def both() -> None:
            run()
            self._move(index)

        return both

    # -- moving averages --------------------------------------------------------------------------

    def _average_of(self, head: Auxiliary) -> dict[str, Tensor]:
        """The moving average by the names of the block's parameters: the parameters themselves, or
        copies as wide as what training continues from, for small changes would be lost."""
        average = head.average
        wide = torch.promote_types(self._job.held.weights_dtype, torch.float32)
        return {
            n: p.data if p.dtype == wide else self._weight(head, n).to(wide, copy=True)
            for n, p in (() if average is None else average.named_parameters())
        }

    @torch.no_grad()
    def _move(self, index: int) -> None:
        """Move a group's average towards the next group's first block, as it is now."""
        head = self._heads[index]
        for name, mean in self._averages[index].items():
            mean.lerp_(self._weight(head, name).to(mean.dtype), 1 - self._job.plan.local.momentum)
            assert head.average is not None
            shown = head.average.get_parameter(name).data
            if mean.dtype != shown.dtype:
                shown.copy_(mean)

    def _weight(self, head: Auxiliary, name: str) -> Tensor:
        """What lies here of a weight of the block that a group's average follows."""
        index, slot = self._slots[f"blocks.{head.first}.{name}"]
        return slot.of(updated_weights(self._job.weight_pool, index))

    # -- states -----------------------------------------------------------------------------------

    def stated(self, states: States) -> Beside:
        """The weights of auxiliary networks are states of the training."""
        averages = {
            f"{AUXILIARY}.{i}.{AVERAGE}.{name}": mean
            for i, means in enumerate(self._averages)
            for name, mean in means.items()
        }
        return Beside(states, tuple(sorted(self._job.flow.aside)), averages)


def cuts_of(flow: Flow, placement: Placement) -> list[int]:
    """The stages at which groups begin, but the first."""
    assert isinstance(flow, NativeFlow)
    return [placement.chunks.stage_of[segment] + 1 for segment in flow.heads]


@dataclass(frozen=True)
class Beside(Stateful):
    """States of a job of whose parameters some are no part of the model: these are states of the
    training. averages: by name, what training continues from in place of such a weight."""

    own: States
    aside: tuple[str, ...]
    averages: Mapping[str, Tensor]

    @property
    def states(self) -> States:
        return self.own

    @property
    def _dtype(self) -> torch.dtype:
        return self.own.weight_pool.placement.chunks.kept.dtypes.optimizer

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight) for name, weight in self.own.weights() if name not in self.aside)

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        read = self.reader()
        for name in self.state_names():
            owner, _, state = name.rpartition(".")
            yield name, read(owner, state)

    def state_names(self) -> Iterator[str]:
        yield from self.own.state_names()
        yield from (f"{name}.{VALUE}" for name in self.aside)

    def form(self, name: str, state: str) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.shape(name), self._dtype) if state == VALUE else self.own.form(name, state)

    def reader(self) -> Callable[[str, str | None], Tensor]:
        of = self.own.reader()

        def read(name: str, state: str | None) -> Tensor:
            if state != VALUE:
                return of(name, state)
            mean = self.averages.get(name)
            whole = of(name, None) if mean is None else self.own.whole_tensors.whole(name, mean)
            return whole.to(self._dtype)

        return read

    @torch.no_grad()
    def load(self, value: Fill | None, state: Fill) -> None:
        kept = self.own.weight_reader()

        def weight(name: str, out: Tensor) -> None:
            if name in self.aside:
                state(f"{name}.{VALUE}", out)
            elif value is None:
                out.copy_(kept(name))
            else:
                value(name, out)

        self.own.load(weight, state)

        def average(name: str, out: Tensor) -> None:
            state(f"{name}.{VALUE}", out)

        for name, tensor in self.averages.items():
            self.own.whole_tensors.cutting(average)(name, tensor)
