"""NORM: the global norm of the gradient, and from it the factor that clips it.

The squares of a step wait on the device, a number for each chunk, and are read once. Where losses
are scaled, the gradients are; the factor that clips them takes that back, and a norm that is no
number leaves the step out instead of ending the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf, isfinite

import torch
from torch import Tensor

from outsize.errors import Everywhere
from outsize.runtime.engine import Deed
from outsize.runtime.loss_scale import LossScale
from outsize.runtime.microbatches import Microbatches
from outsize.runtime.points import Points
from outsize.runtime.storage.gradients import Gradients
from outsize.runtime.storage.update import Updates
from outsize.runtime.storage.weight_pool import WeightPool
from outsize.runtime.totals import Totals
from outsize.runtime.watch import Watch
from outsize.schedule import Action, Kind
from outsize.torch_private import disable_current_modes

UNCHANGED = "the weights were left unchanged"


class Diverged(Everywhere):
    """The gradient norm is not finite; the weights were left as they are."""


class Norm:
    """totals: the sums over all workers. clip: the largest norm. value: of the last step. scaling:
    of the next one's losses, where they are scaled."""

    kinds = (Kind.NORM,)

    def __init__(
        self,
        weight_pool: WeightPool,
        microbatches: Microbatches,
        gradients: Gradients,
        updates: Updates,
        totals: Totals,
        clip: float | None,
        watch: Watch,
    ) -> None:
        self._weight_pool, self._microbatches = weight_pool, microbatches
        self._gradients, self._updates, self._totals = gradients, updates, totals
        self.clip, self.value = clip, 0.0
        self.scaling: LossScale | None = None
        self._watch = watch
        self._norms: dict[int, Tensor] = {}  # by chunk

    def bind(self, action: Action, index: int, points: Points) -> Deed:
        after = "some weights have been updated" if action.stage > 0 else UNCHANGED
        return Deed(partial(self._run, points.at_norm(action.stage), after))

    def begin(self, points: Points) -> None:
        self._norms.clear()
        self.value, self._updates.scale, self._updates.skips = 0.0, 1.0, False

    def reset(self) -> None:
        self._norms.clear()

    def completing(self, index: int, points: Points) -> Callable[[], None] | None:
        """Behind an action: gradients that are complete, and will leave."""
        stages = points.complete.get(index, ())
        return partial(self.square, tuple(stages)) if stages else None

    def square(self, stages: Iterable[int]) -> None:
        """Take the norms of gradients that are complete: those that this worker updates."""
        weight_pool, ledger = self._weight_pool, self._watch.ledger
        for stage in stages:
            for index in weight_pool.placement.chunks.of_stage[stage]:
                gradients = weight_pool.updated_gradients(index)
                if gradients is not None:
                    norm = self._norms[index] = torch.linalg.vector_norm(gradients)
                    if ledger is not None:
                        ledger.release(norm)  # one number is of no account

    def squares(self, chunks: Iterable[int]) -> dict[int, float]:
        """Those of chunks, of which some may have no gradient."""
        mine = [index for index in chunks if index in self._norms]
        if not mine:
            return {}
        with disable_current_modes():  # a few numbers: the ledger does not count them
            norms = torch.stack([self._norms[index] for index in mine]).tolist()
        return {index: norm * norm for index, norm in zip(mine, norms, strict=True)}

    def _run(self, stages: tuple[int, ...], after: str) -> None:
        self.square(stages)
        squares, mine = self.squares(sorted(self._norms)), self._microbatches
        total, mine.loss = self._totals.sums(squares, mine.loss, self._gradients.touched)
        self._norms.clear()
        self.value, scale = total**0.5, 1.0
        if self.scaling is None:
            finite(self.value, after)
        else:
            scale = self.scaling.factor
            self.value = self.value / scale
            mine.loss.div_(scale)
            self.scaling = self.scaling.after(self.value)
            if not isfinite(self.value):
                self.value, self._updates.skips = inf, True
        clip = 1.0 if self.clip is None else min(1.0, self.clip / (self.value + 1e-6))
        self._updates.scale = clip / scale


def finite(norm: float, after: str) -> None:
    """Raise Diverged for a norm that is no number."""
    if norm != norm or norm == float("inf"):
        raise Diverged(
            f"gradient norm is {norm} at this step; expected a finite number: lower the learning"
            f" rate or check the data; {after}"
        )
