"""Parts of blocks that are computed again, tiled or spilled: their calls are taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from outsize.plan import Plan, Stage
from outsize.runtime.again import recomputed, tiled
from outsize.runtime.flow import Flow
from outsize.runtime.intercept import Undo, intercept
from outsize.runtime.spill import Spills, spilling


def wrapped(flow: Flow, plan: Plan, spills: Spills) -> Iterator[Undo]:
    """Take over the calls of these parts; gives what ends it, for each."""
    for stage in plan.stages:
        for block in flow.blocks[max(0, stage.first - 1) : max(0, stage.last - 1)]:
            for name, part in block.named_modules():
                forward = _instead(flow, plan, spills, stage, name, part) if name else None
                if forward is not None:
                    yield intercept(part, forward)


def _instead(
    flow: Flow, plan: Plan, spills: Spills, stage: Stage, name: str, part: nn.Module
) -> Callable[..., Any] | None:
    if plan.mlp_tile and name == "mlp":
        return tiled(part, plan.mlp_tile)
    if name in stage.recompute:
        return recomputed(part, flow.replay)
    if stage.spills and name in stage.spill:
        return spilling(part, spills)
    return None
