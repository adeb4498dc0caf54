"""Where the stages of a pipeline begin, for `prepare`: as the first worker finds, for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from outsize.collectives import World, everyone
from outsize.hardware.probe import probe
from outsize.plan import Plan
from outsize.search.settled import settled
from outsize.simulate.costs import Costs


def balanced(
    plans: Sequence[Plan], rehearsed: Callable[[Plan], Costs], world: World, device: torch.device
) -> list[Plan]:
    """Plans whose cuts balance the workers, by the foretold costs of the model's stages; equal
    numbers of stages where a forward that depends on values cannot be foretold."""
    if world.mesh.pipeline == 1 or plans[0].pipeline.cuts:
        return list(plans)
    try:
        found = settled(plans[0], rehearsed(plans[0]), probe()).pipeline
    except (DataDependentOutputException, DynamicOutputShapeException):
        return list(plans)
    # Clocks differ between machines, and so might cuts.
    every = [*found.cuts, *found.costs, *found.head]
    numbers = torch.tensor(every, dtype=torch.float64, device=device)
    *cuts, a, b, c, d, e, f = everyone(world).broadcast(numbers).tolist()
    same = replace(found, cuts=tuple(map(int, cuts)), costs=(a, b, c), head=(d, e, f))
    return [replace(plan, pipeline=same) for plan in plans]
