"""Steps before some of which the batch passes once more, with labels that the model draws: see
outsize/techniques/optim/sophia.py.

That pass plays the list of a step. Its labels are drawn where the logits are, by a number for each
token that comes with the batch; its gradients are not clipped, and its UPDATE gives them to the
optimizer as an estimate. No weight moves, and no update is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.kernels.entropy import DRAWN
from outsize.models.random import uniform
from outsize.optim import Optimizer
from outsize.optim.optimizer import Rates
from outsize.plan import Plan
from outsize.runtime.engine import Loaded, Ran
from outsize.runtime.flow import Flow
from outsize.runtime.handlers.training import Training
from outsize.runtime.native import NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.runtime.special.counted import Counted
from outsize.torch_private import FakeTensor

if TYPE_CHECKING:
    from outsize.runtime.job import Job

NOTES = "curvature"  # of a checkpoint


@runtime_checkable
class Curved(Optimizer, Protocol):
    """An optimizer that has estimates of drawn labels, in the first of every `gap` steps."""

    @property
    def gap(self) -> int: ...

    def estimate(self, gradients: Tensor, state: Mapping[str, Tensor], count: float) -> None:
        """Take up the gradient of the mean loss over so many drawn labels."""


class Curvature(Counted):
    """Steps with such passes: see outsize/runtime/method.py."""

    rehearsed = False
    noted, said = NOTES, "its estimates of curvature are"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._own = _curved(job.recipe)
        gap = self._own.gap
        often = "each step" if gap == 1 else f"the first of every {gap} steps"
        self.more = 1 / gap, f"a pass with drawn labels before {often}"

    @staticmethod
    def freeze(flow: Flow, plan: Plan, recipe: Recipe) -> None:
        """Nothing is frozen. OutsizeError for a model whose logits are not here."""
        _curved(recipe)
        if not isinstance(flow, NativeFlow):
            raise OutsizeError(
                "optimizer: labels are drawn from the logits of a native decoder, and the model is"
                " adopted; take another optimizer"
            )

    @property
    def _due(self) -> bool:
        return self._steps % self._own.gap == 0

    def ready(
        self, batch: Any, cuts: Sequence[tuple[int, int]], factor: float, lr: float | None
    ) -> None:
        self._next = batch, cuts, factor, lr
        super().ready(self._drawing(batch) if self._due else batch, cuts, factor, lr)

    def _drawing(self, batch: Batch) -> Batch:
        """The batch, and a number in [0, 1) for each token by which its label is drawn."""
        rows, tokens = batch.ids_BS.shape
        first = self._job.plan.rows_at(self._job.place)[0] * tokens
        if isinstance(batch.ids_BS, FakeTensor):
            drawn_BS = torch.empty_like(batch.ids_BS, dtype=torch.float64)
        else:
            name = f"{NOTES}.{self._steps}"
            found = uniform(self._job.recipe.seed, name, first, first + rows * tokens)
            drawn_BS = torch.from_numpy(found).view(rows, tokens).to(batch.ids_BS.device)
        return replace(batch, columns={**batch.columns, DRAWN: drawn_BS})

    def play(self, step: Loaded, begin: float) -> list[Ran]:
        if self._due:
            self._estimate(step, begin)
            Training.ready(self, *self._next)
        return super().play(step, begin)

    def _estimate(self, step: Loaded, begin: float) -> None:
        """Play a step whose labels are drawn."""
        updates, norm, chunks = self.updates, self.norm, self._job.weight_pool.chunks
        clip, counts = norm.clip, [dict(chunk.steps) for chunk in chunks]
        drawn = 1 / self._next[2]

        def rule(_: Tensor, gradients: Tensor, state: Mapping[str, Tensor], __: Rates) -> None:
            self._own.estimate(gradients, state, drawn)

        norm.clip, updates.rule = None, rule
        try:
            self.engine.play(step, begin)
        finally:
            norm.clip, updates.rule = clip, None
            for chunk, count in zip(chunks, counts, strict=True):
                chunk.steps = count


def _curved(recipe: Recipe) -> Curved:
    assert isinstance(recipe.optimizer, Curved), "check_approximate goes before"
    return recipe.optimizer
