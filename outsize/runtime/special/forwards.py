"""What a zeroth-order step is made of: its settings, and what holds for its passes.

A step updates every stage and then takes all microbatches through it twice, with either sign, while
its weights are present (outsize/runtime/special/zeroth.py plays it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.runtime.flow import Flow
from outsize.schedule.chunks import Chunks

NAME = "zeroth-order"  # what `approximate` must name


@dataclass(frozen=True)
class Zeroth:
    """lr: step size, a hundredth or less of what a gradient takes. epsilon: how far the two losses
    are taken from the weights. weight_decay: of matrices, decoupled. seed: of the directions."""

    lr: float = 1e-6
    epsilon: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0


def check(plan: Plan, settings: Zeroth) -> None:
    """Refuse what cannot be, before anything is allocated."""
    if NAME not in plan.approximate:
        raise OutsizeError(
            f"plan: approximate is {list(plan.approximate)}; a job without gradients changes the"
            f" maths: name {NAME} there"
        )
    for name in ("lr", "epsilon"):
        value = getattr(settings, name)
        if not value > 0 or not math.isfinite(value):
            raise OutsizeError(f"{NAME}: {name} is {value}; expected a positive number")


def uses_of(flow: Flow, chunks: Chunks) -> list[tuple[int, ...]]:
    """By stage, the stages whose parameters it computes with, itself first."""
    stage_of, stages = chunks.stage_of, chunks.plan.stages
    used = ([stage_of[u] for i in range(x.first, x.last) for u in flow.uses[i]] for x in stages)
    return [tuple(dict.fromkeys((s, *others))) for s, others in enumerate(used)]


@contextmanager
def still(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and without changes to the running figures of norms."""
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
