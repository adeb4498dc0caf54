"""Adapters that train at a rank drawn for each step: see outsize/techniques/elastic_adapters.py.

What is drawn is a function of the seed, the step and the adapter's name, the same on every worker.
Components that a step leaves out have gradients of zeros, as slices of a parameter have in PyTorch:
the optimizer's moments fade and weights decay in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import nn

from outsize.errors import OutsizeError
from outsize.models.adapter import Nested
from outsize.plan import Plan
from outsize.runtime.engine import Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.recipe import Recipe
from outsize.runtime.special.counted import Counted

if TYPE_CHECKING:
    from outsize.runtime.job import Job

NAME = "elastic-adapters"
NOTES, MIDDLE = "elastic", "middle"  # of a checkpoint: the middle rank


class Ranks(Protocol):
    """The technique's settings."""

    @property
    def middle(self) -> int: ...

    def check(self, rank: int) -> None: ...

    def rank(self, seed: int, step: int, name: str) -> int: ...


class Elastic(Counted):
    """Steps at ranks that are drawn: see outsize/runtime/method.py."""

    noted, said = NOTES, "its drawn ranks are"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._own: Ranks = job.recipe.of(NAME)
        self._seed = job.recipe.seed
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
            return super().play(step, begin)
        finally:
            for one in self._adapters.values():
                one.used = None

    def beside(self) -> Mapping[str, int]:
        return {MIDDLE: self._own.middle}


def _nested(model: nn.Module) -> Iterator[tuple[str, Nested]]:
    """Those that are all that is beside a Linear, by name."""
    for name, one in model.named_modules():
        if isinstance(one, Nested) and name.endswith(".beside"):
            yield name, one
