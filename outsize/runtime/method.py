"""Method: how the steps of a job find what its weights move by. The usual one is a backward pass
(outsize/runtime/handlers/training.py); a technique may have another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from outsize.models.cuts import Cut
from outsize.plan import Plan
from outsize.registry import TECHNIQUES
from outsize.runtime.engine import Engine, Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.sample import Sample
from outsize.runtime.loss_scale import LossScale
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.storage.states import Stateful, States
from outsize.schedule import Action
from outsize.schedule.layout import Placement
from outsize.schedule.program import Program

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.making import Trainable

Notes = Mapping[str, Mapping[str, float]]
GRADIENTS = "outsize.runtime.handlers.training.Training"


class Method(Protocol):
    """Made for a job whose states are there; what a method does not say is as usual.

    engine: plays what its handlers carry out; evaluations and tokens too, of whose walks and
    numbers microbatches and sample know. rehearsed: a step is predicted from one microbatch's
    actions; else all of them are played. left: the share of the layers that each step leaves alone,
    where it does; what the others were is copied. scaling: of losses, where they are scaled. more:
    what is played before some steps, as a share of a step on average, and what it is, in words.
    """

    rehearsed: ClassVar[bool] = True
    left: float | None = None
    more: tuple[float, str] = (0.0, "")
    engine: Engine
    microbatches: Microbatches
    sample: Sample

    def __init__(self, job: Job) -> None: ...

    @staticmethod
    def recipe(said: Recipe) -> Recipe:
        """How a run trains that says so much. OutsizeError for settings that cannot be."""
        return said

    @staticmethod
    def planned(plan: Plan, recipe: Recipe) -> Plan:
        """A plan with what the technique's settings say of it."""
        return plan

    @staticmethod
    def adapted(model: Trainable, plan: Plan, recipe: Recipe) -> tuple[Trainable, Plan]:
        """What is trained in place of a model and its plan. OutsizeError for what cannot be."""
        return model, plan

    @staticmethod
    def freeze(flow: Flow, plan: Plan, recipe: Recipe) -> None:
        """Freeze what the first steps do not train."""

    @staticmethod
    def placement(
        flow: Flow, plan: Plan, recipe: Recipe, here: Here, cuts: Mapping[str, Cut]
    ) -> Placement:
        """Where the states of a model rest. OutsizeError for what cannot be, before anything is
        allocated."""

    @staticmethod
    def program(flow: Flow, placement: Placement) -> Program:
        """What every worker does in a step."""

    @property
    def scaling(self) -> LossScale | None:
        return None

    def check(self) -> None:
        """Refuse a step on weights of which some have moved and some have not, or of which others
        are trained than the job was made for."""

    def due(self) -> Collection[str] | None:
        """The names of all parameters that the next step trains, where those are others."""
        return None

    def ready(
        self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float, lr: float | None
    ) -> None:
        """Set out on a step. cuts: rows of each microbatch. factor: of their losses."""

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        """Make the step, as Engine.play does."""

    def found(self) -> tuple[Tensor, float]:
        """Of the last step: the mean loss, and the norm that its report has."""

    def settle(self, shown: bool = False) -> None:
        """Have the weights be those that all steps made so far have given. shown: and the
        parameters what evaluations see of them, until the next step."""

    def stated(self, states: States) -> States | Stateful:
        """What is saved of the weights and states that rest with the job."""
        return states

    def seconds(self, action: Action) -> float:
        """What an action takes beside its operations, for forecasts."""
        return 0.0

    def notes(self) -> Notes:
        """What a checkpoint keeps beside tensors and counts, by name."""
        return {}

    def recall(self, notes: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's notes, which have other names too."""

    def mend(self) -> None:
        """Weights and counts were loaded: go on from there."""

    def close(self) -> None:
        """Give the model back."""


def method_of(approximate: Iterable[str]) -> type[Method]:
    """What makes the steps of a plan: the method of the one technique that has another, if any."""
    named = (one.method for name in approximate if (one := TECHNIQUES.find(name)) is not None)
    found: type[Method] = resolve_name(next(filter(None, named), GRADIENTS))
    return found
