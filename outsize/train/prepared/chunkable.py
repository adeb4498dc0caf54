"""Whether somebody's own module runs in chunks of the sequence: found on the first tokens of a row.

Asked where no other plan fits a budget. The module's code runs once on a dozen tokens, as a step
with chunks would have it; its buffers and random numbers are as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.plan.settings import Settings
from outsize.runtime.adopted.flow import AdoptedFlow
from outsize.runtime.again import Replay
from outsize.torch_private import tree_leaves, tree_map
from outsize.train.prepared.loss_sums import Loss

FEW, CHUNK = 12, 5  # tokens that are tried, and of a chunk


def tokens_of(batch: Any) -> int:
    """Of a row, by the batch's first tensor of rows; 0 where it has none."""
    sizes = (x.shape[1] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim > 1)
    return next(sizes, 0)


def runs(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    batch: Any,
    loss: Loss,
    settings: Settings,
    heads: bool,
) -> bool:
    """Whether a plan with these settings runs. heads: with logits in chunks too."""
    tokens, segments = tokens_of(batch), len(blocks) + 2
    if tokens <= FEW:
        return False
    stages = per_segment(segments, ("block",))
    chunk = CHUNK if heads else 0
    plan = Plan(segments, stages, 1, 1, 0, Precision.named("float32"), chunk, settings=settings)

    def first(x: Any) -> Any:
        rows = isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == tokens
        return x[:1, :FEW] if rows else x

    flow = AdoptedFlow(model, blocks, plan, loss)
    try:
        with Replay(model)():
            walk = flow.begin(tree_map(first, batch), 1.0)
            for stage in range(segments):
                walk.forward(stage)
    except Exception:  # somebody else's code, on less than it was made for
        return False
    finally:
        flow.attach(None)
    return True
