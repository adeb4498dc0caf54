"""Costs: what an order of zero-bubble or V schedules is made for."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from outsize.errors import OutsizeError

_FINEST = 10**9  # the largest denominator of a time: 1.2 is 6/5, not the float next to it


@dataclass(frozen=True)
class Costs:
    """Seconds of a unit's forward, input gradient and weight gradient, and of a transfer."""

    forward: float = 1.0
    of_input: float = 1.0
    of_weight: float = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for value in (*self.each, self.transfer):
            if not 0 <= value < float("inf"):
                raise OutsizeError(f"costs: {value}; expected seconds, not negative")

    @property
    def each(self) -> tuple[float, float, float]:
        """Forward, input gradient, weight gradient."""
        return (self.forward, self.of_input, self.of_weight)

    def whole(self) -> Costs:
        """The same costs as whole numbers of one tick, so that sums of them tie exactly."""
        parts = [Fraction(v).limit_denominator(_FINEST) for v in (*self.each, self.transfer)]
        tick = lcm(*(part.denominator for part in parts))
        return Costs(*(int(part * tick) for part in parts))


EQUAL = Costs()
