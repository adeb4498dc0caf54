"""Costs: what an order of zero-bubble or V schedules, or of ends cut over workers, is made for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from outsize.errors import OutsizeError
from outsize.schedule.action import Kind
from outsize.schedule.ends import Ends

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


@dataclass(frozen=True)
class EndCosts:
    """Seconds that the first and the last layer would take on one worker, of one microbatch.

    forward, of_input, of_weight: of the output layer. embed, embed_backward: of the input layer.
    held: units of activations that a worker keeps of its part of the output layer (`Ends.holds`).
    """

    forward: float = 1.0
    of_input: float = 1.0
    of_weight: float = 1.0
    embed: float = 0.0
    embed_backward: float = 0.0
    held: float = 0.0

    def __post_init__(self) -> None:
        for value in (*self.output, self.embed, self.embed_backward, self.held):
            if not 0 <= value < float("inf"):
                raise OutsizeError(f"costs of the ends: {value}; expected a number, not negative")

    @property
    def output(self) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient of the output layer."""
        return (self.forward, self.of_input, self.of_weight)

    def of_pass(self, kind: Kind, ends: Ends, workers: int) -> float:
        """Seconds of one worker's pass, where all have parts of one size."""
        each: Iterable[float] = (getattr(self, name) for name in ends.priced.get(kind, ()))
        return sum(each) / workers


EQUAL = Costs()
