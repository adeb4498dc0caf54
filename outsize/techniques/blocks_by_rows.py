"""A run of blocks with another degree on the tensor axis: whole weights, shared rows.

Yuan et al., "OneFlow", 2021: layouts (split, broadcast, partial) that differ by part of the model,
with conversions where they meet. How blocks do it is outsize/parallel/tensor/by_rows.py. Exact.
"""

from __future__ import annotations

from outsize.collectives.axes import Clash
from outsize.plan import Plan
from outsize.plan.approximate import PARTIAL
from outsize.plan.settings import PLAN_SETTINGS, PlanSetting
from outsize.registry import TECHNIQUES

NAME = "blocks_by_rows"
WORTH = 0.97  # of a step's time


def quicker(plan: Plan) -> tuple[int, ...]:
    """Numbers of blocks that are worth a forecast, the most first: each saves as much as another
    and takes as much memory."""
    blocks = plan.segments - 2
    if plan.mesh.tensor == 1 or plan.microbatch_size % plan.mesh.tensor:
        return ()
    eighths = (-(-blocks * eighth // 8) for eighth in (8, 6, 4, 2, 1))
    return tuple(dict.fromkeys(eighths))


def _otherwise(plan: Plan) -> bool:
    """Whether microbatches leave blocks out, or steps are no backward pass through all of them."""
    every = [TECHNIQUES.find(name) for name in plan.approximate]
    return PARTIAL in plan.approximate or any(one is not None and one.method for one in every)


PLAN_SETTINGS.add(
    NAME,
    PlanSetting(
        NAME,
        "blocks at the front whose weights are whole on every worker of the tensor axis, which"
        " share a microbatch's rows there; 0: all are cut",
        (
            Clash(
                "and another axis of the mesh cuts the tokens of rows, which then are not whole",
                lambda plan: bool(plan.mesh.cutting("tokens")),
                "set it to 0, or that axis to 1",
            ),
            Clash(
                "and blocks run in chunks of the sequence, which are of all rows",
                lambda plan: plan.block_tokens > 0,
                "set one of them to 0",
            ),
            Clash(
                "and what approximate holds leaves blocks out, or makes steps in its own way",
                _otherwise,
                "set it to 0, or leave that out",
            ),
        ),
        axis="tensor",
        native="whose own code knows what rows are",
        quicker=quicker,
        worth=WORTH,
        by_rows=True,
        run=False,
        draws=(0, 1, 1, 2, 3),
    ),
)
