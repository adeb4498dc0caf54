"""Batch normalisation where a batch comes in microbatches, or its rows lie on several workers.

Statistics of a whole batch are those of one microbatch on one worker. Of several they are known at
a layer only when all have come there, so that every layer would be a barrier and a pipeline would
have nothing to overlap. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism", 2018, therefore normalise each microbatch by its own statistics, and move the
averages that an evaluation uses once a step, by the mean of all microbatches. So it is here, where
`approximate` names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from outsize.collectives import World
from outsize.collectives.world import everyone
from outsize.runtime.adopted.absent import Absent


def normalising(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """A module's batch normalisations that use a batch's own statistics, by path."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            yield name, module


class _Average:
    """A normalisation's running statistics in a step: what they were as it began, and the sums of
    what microbatches had."""

    def __init__(self, norm: _BatchNorm, mean: Tensor, var: Tensor, tracked: Tensor) -> None:
        self.norm, self.momentum = norm, norm.momentum
        self.running, self.tracked = (mean, var), tracked
        self._began = (mean.clone(), var.clone()), tracked.clone()
        self.seen = torch.zeros(2 * mean.numel() + 1, dtype=torch.float64, device=mean.device)
        norm.momentum = 1.0  # each forward leaves its own
        self._hook = norm.register_forward_hook(self._add)

    @torch.no_grad()
    def _add(self, norm: nn.Module, _: Any, output: object) -> None:
        """A forward has ended; not one of values that other workers have, nor a second one, whose
        statistics go to buffers that stand in (outsize/runtime/again.py)."""
        if isinstance(output, Absent) or norm.running_mean is not self.running[0]:
            return
        self.seen += torch.cat((*self.running, self.seen.new_ones(1)))

    @torch.no_grad()
    def move(self, seen: Tensor | None) -> None:
        """Go on from where the step began, by what all workers have seen."""
        self._hook.remove()
        self.norm.momentum = self.momentum
        (mean, var), tracked = self._began
        self.running[0].copy_(mean)
        self.running[1].copy_(var)
        self.tracked.copy_(tracked)
        if seen is None or not seen[-1]:
            return
        self.tracked += 1
        share = 1 / float(self.tracked) if self.momentum is None else self.momentum
        for running, sums in zip(self.running, seen[:-1].chunk(2), strict=True):
            running.mul_(1 - share).add_((sums / seen[-1]).to(running.dtype), alpha=share)


@contextmanager
def moved_once(model: nn.Module, world: World, microbatches: int) -> Iterator[None]:
    """A step of a module: its running statistics are moved once, by the mean over all microbatches
    and workers, and are the same on all workers afterwards."""
    several = microbatches > 1 or world.mesh.size > 1
    averages = list(_averages(model)) if several else []
    seen: list[Tensor | None] = [None] * len(averages)
    try:
        yield
        if averages:
            sums = torch.cat([average.seen for average in averages])
            if world.mesh.size > 1:
                sums = everyone(world, "agreement").all_reduce(sums)
            seen = list(sums.split([average.seen.numel() for average in averages]))
    finally:
        for average, mine in zip(averages, seen, strict=True):
            average.move(mine)


def _averages(model: nn.Module) -> Iterator[_Average]:
    for _, norm in normalising(model):
        mean, var, tracked = norm.running_mean, norm.running_var, norm.num_batches_tracked
        if mean is not None and var is not None and tracked is not None:
            yield _Average(norm, mean, var, tracked)
