"""What the schedules of a V share: passes and microbatches made into actions of its two stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outsize.schedule.action import Action
from outsize.schedule.pipelines.pipeline import forward, of_input, of_weight

_MAKE = (forward, of_input, of_weight)


def orders_of(orders: Sequence[Iterable[tuple[int, int, int]]]) -> list[list[Action]]:
    """(forward, input or weight gradient; first or second pass; microbatch) as actions.

    Forwards go down first and then up; gradients start where forwards ended, so their first pass
    is over the upper half of the stages.
    """
    last = 2 * len(orders) - 1
    return [
        [
            _MAKE[kind](w if (kind == 0) == (way == 0) else last - w, microbatch)
            for kind, way, microbatch in order
        ]
        for w, order in enumerate(orders)
    ]
