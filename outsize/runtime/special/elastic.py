"""Adapters that train at a rank drawn for each step: see outsize/techniques/elastic_adapters.py.

What is drawn is a function of the seed, the step and the adapter's name, the same on every worker.
Components that a step leaves out have gradients of zeros, as slices of a parameter have in PyTorch:
the optimizer's moments fade and weights decay in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adapter import Nested
from outsize.plan import Plan
from outsize.runtime.engine import Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.recipe import Recipe

if TYPE_CHECKING:
    from outsize.runtime.job import Job
    from outsize.runtime.method import Notes

NAME = "elastic-adapters"
NOTES, STEPS, MIDDLE = "elastic", "steps", "middle"  # of a checkpoint: steps made, the middle rank


class Ranks(Protocol):
    """The technique's settings."""

    @property
    def middle(self) -> int: ...

    def check(self, rank: int) -> None: ...

    def rank(self, seed: int, step: int, name: str) -> int: ...


class Elastic(Training):
    """Steps at ranks that are drawn: see outsize/runtime/method.py."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._own: Ranks = job.recipe.of(NAME)
        self._seed, self._steps = job.recipe.seed, 0
        self._adapters = dict(_nested(job.flow.model))

    @staticmethod
    def freeze(flow: Flow, plan: Plan, recipe: Recipe) -> None:
        """Nothing is frozen; the ranks are checked before anything is allocated."""
        ranks = {one.rank for _, one in _nested(flow.model)}
        if not ranks:
            raise OutsizeError(
                f"plan.approximate holds {NAME}, and the model has no low-rank adapter, whose"
                " ranks are drawn; set one (outsize keys adapt), or leave it out"
            )
        for rank in ranks:
            recipe.of(NAME).check(rank)

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        for name, one in self._adapters.items():
            one.used = self._own.rank(self._seed, self._steps, name)
        try:
            ran = super().play(step, begin)
        finally:
            for one in self._adapters.values():
                one.used = None
        self._steps += 1
        return ran

    def notes(self) -> Notes:
        return {**super().notes(), NOTES: {STEPS: self._steps, MIDDLE: self._own.middle}}

    def recall(self, notes: Mapping[str, Any]) -> None:
        super().recall(notes)
        found = notes.get(NOTES, {})
        made = found.get(STEPS, 0) if isinstance(found, dict) else None
        if not isinstance(made, int) or made < 0:
            raise OutsizeError(f"checkpoint: its drawn ranks are {found!r}; expected numbers")
        self._steps = made


def _nested(model: nn.Module) -> Iterator[tuple[str, Nested]]:
    """Those that are all that is beside a Linear, by name."""
    for name, one in model.named_modules():
        if isinstance(one, Nested) and name.endswith(".beside"):
            yield name, one
