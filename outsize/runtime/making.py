"""The one place where a job is made of a model, a plan and a recipe: for training runs, `prepare`,
`verify`, and the rehearsals that predict them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

from outsize.collectives import along
from outsize.kernels.entropy import PLAIN, Loss, LossOptions
from outsize.models.cuts import NO_CUTS, Cut
from outsize.models.decoder import Decoder
from outsize.parallel.automatic.apply import spread
from outsize.parallel.automatic.derive import Derived
from outsize.parallel.divide import divide
from outsize.parallel.execution import execution_of
from outsize.plan import Plan
from outsize.runtime.adopted.flow import AdoptedFlow
from outsize.runtime.adopted.reach import Reach
from outsize.runtime.flow import Flow
from outsize.runtime.job import Job
from outsize.runtime.method import method_of
from outsize.runtime.native import NativeFlow
from outsize.runtime.recipe import ALONE, Here, Recipe
from outsize.runtime.runners import check_paths
from outsize.runtime.storage.states import Fill

Cuts = Mapping[str, Cut]


class Trainable(Protocol):
    """What is trained: a model and its loss. fill: as a Job has it."""

    @property
    def fill(self) -> Fill | None: ...

    def part(self, plan: Plan, here: Here) -> tuple[Flow, Cuts]:
        """What one worker computes, and how its parameters were cut for that."""


@dataclass(frozen=True)
class NativeModel:
    """A decoder. options: of its cross-entropy; loss: what is made of each target's."""

    model: Decoder
    options: LossOptions = PLAIN
    loss: Loss | None = None
    fill: Fill | None = None

    def part(self, plan: Plan, here: Here) -> tuple[Flow, Cuts]:
        """Leaves of the decoder what this worker has of it."""
        check_paths(self.model.config, plan)
        cuts = divide(self.model, here.world, plan, here.line)
        execution = replace(execution_of(plan.mesh, here.world), loss=self.loss)
        return NativeFlow(self.model, plan, self.options, execution), cuts


@dataclass(frozen=True)
class AdoptedModel:
    """Somebody's own module; blocks, loss, split, counter, reach: as AdoptedFlow has them. derived:
    what of its blocks the tensor axis cuts, by path."""

    model: nn.Module
    blocks: Sequence[tuple[str, nn.Module]]
    loss: Callable[[Any, Any], Tensor]
    split: Callable[[Any, int, int], Any] | None = None
    counter: Callable[[Any], Tensor] | None = None
    reach: Reach | None = None
    derived: Mapping[str, Derived] = field(default_factory=dict)
    fill: Fill | None = None

    def part(self, plan: Plan, here: Here) -> tuple[Flow, Cuts]:
        """Leaves of the module what this worker has of it."""
        cuts: Cuts = NO_CUTS
        if self.derived:
            cuts = spread(self.model, self.derived, along(here.world, "tensor"))
        return AdoptedFlow(
            self.model, self.blocks, plan, self.loss, self.split, self.counter, self.reach
        ), cuts


def make_job(model: Trainable, plan: Plan, recipe: Recipe, here: Here = ALONE) -> Job:
    """The job that trains a model under a plan, on one of its workers."""
    model, plan = method_of(plan.approximate).adapted(model, plan, recipe)
    flow, cuts = model.part(plan, here)
    return Job(flow, plan, recipe, here, cuts, model.fill)
