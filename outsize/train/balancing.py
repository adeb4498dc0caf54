"""What workers must plan alike under `prepare`: as the first worker finds, for all. Where the
stages of a pipeline begin, and where states rest, follow from rates that each measures itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outsize.collectives import World, everyone
from outsize.hardware.probe import probe
from outsize.plan import Plan, from_yaml, to_yaml
from outsize.search.settled import settled
from outsize.simulate.costs import Costs
from outsize.torch_private import DataDependentOutputException, DynamicOutputShapeException


def balanced(
    plans: Sequence[Plan], rehearsed: Callable[[Plan], Costs], world: World, device: torch.device
) -> list[Plan]:
    """Plans whose cuts balance the workers, by the predicted costs of the model's stages; equal
    numbers of stages where a forward that depends on values cannot be predicted."""
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


def agreed(plan: Plan, world: World, device: torch.device) -> Plan:
    """The first worker's plan; all call this."""
    if world.mesh.size == 1:
        return plan
    said = torch.frombuffer(bytearray(to_yaml(plan).encode()), dtype=torch.uint8)
    size = torch.tensor([len(said)], dtype=torch.float64, device=device)
    size = everyone(world).broadcast(size)
    text = torch.zeros(int(size), dtype=torch.uint8)
    text[: len(said)] = said[: len(text)]  # others' own is overwritten
    told = everyone(world).broadcast(text.to(device)).cpu()
    return from_yaml(bytes(told.tolist()).decode())
