"""Method: how the steps of a job find what its weights move by. The usual one is a backward pass
(outsize/runtime/handlers/training.py); a technique may have another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from outsize.models.cuts import Cut
from outsize.plan import Plan
from outsize.registry import TECHNIQUES
from outsize.runtime.engine import Engine, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule.layout import Placement
from outsize.schedule.program import Program

if TYPE_CHECKING:
    from outsize.runtime.job import Job

GRADIENTS = "outsize.runtime.handlers.training.Training"


class Method(Protocol):
    """Made for a job whose states are there. engine: plays what its handlers carry out; evaluations
    and tokens too, of whose walks and numbers microbatches and sample know."""

    engine: Engine
    microbatches: Microbatches
    sample: Sample

    def __init__(self, job: Job) -> None: ...

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        """Where the states of a model rest. OutsizeError for what cannot be, before anything is
        allocated."""

    @staticmethod
    def program(flow: Flow, placement: Placement) -> Program:
        """What every worker does in a step."""

    def check(self) -> None:
        """Refuse a step on weights of which some have moved and some have not, or of which others
        are trained than the job was made for."""

    def ready(
        self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float, lr: float | None
    ) -> None:
        """Set out on a step. cuts: rows of each microbatch. factor: of their losses."""

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        """Make the step, as Engine.play does."""

    def found(self) -> tuple[Tensor, float]:
        """Of the last step: the mean loss, and the norm that its report has."""

    def settle(self) -> None:
        """Have the weights be those that all steps made so far have given."""

    def mend(self) -> None:
        """Weights and counts were loaded: go on from there."""

    def close(self) -> None:
        """Give the model back."""


def method_of(recipe: Recipe) -> type[Method]:
    """What makes the steps of an optimizer: its technique's, where that says so."""
    name = recipe.optimizer.approximate
    one = None if name is None else TECHNIQUES.find(name)
    found: type[Method] = resolve_name((one and one.method) or GRADIENTS)
    return found
