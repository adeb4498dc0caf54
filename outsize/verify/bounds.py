"""How far a run in its own precision may be from plain float64: what rounding does to the plain
run, parameter by parameter, times a factor that chance does not reach.

Every number that is compared (a parameter's ratio of gradients, largest difference of gradients and
of weights; the loss, the norm) is compared for SAMPLES plain runs as well, whose results are moved
at random (outsize/verify/rounding.py). The root of the mean of their squares is the number's
deviation; FACTOR times that is allowed. What is a little above is asked of twice as many runs,
until it is within, or MORE have said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

from outsize.plan import Precision
from outsize.verify import plain
from outsize.verify.case import Case
from outsize.verify.compare import Comparison, compare
from outsize.verify.plain import Step
from outsize.verify.rounding import Rounding

SAMPLES, MORE = 2, 16  # runs that are moved: of each verdict, and of one that is "no"
FACTOR = 6.0  # Student's t with 16 degrees of freedom is beyond it twice in 100,000
CLEAR = 50.0  # times what is allowed: Student's t with 2 is beyond that once in 100,000
TELLS = 0.5  # what a ratio may be off by, at most, or it could not tell a gradient counted twice
LEAST = 1e-11  # of float64 itself
Key = tuple[str, str]  # of a number: the parameter, "" for the whole model, and what of it


@dataclass(frozen=True)
class Over:
    """A number that is farther from plain float64 than rounding brings it."""

    key: Key
    found: float
    allowed: float

    @property
    def clear(self) -> bool:
        """Whether more runs would say the same."""
        return not self.found <= CLEAR * self.allowed

    def __str__(self) -> str:
        name, what = self.key
        return f"{name or 'model'}: {what} off by {self.found:.2g}, {self.allowed:.2g} is allowed"


@dataclass(frozen=True)
class Bounds:
    """What is allowed, by number. runs: how many moved runs it is known from."""

    allowed: Mapping[Key, float]
    runs: int

    def over(self, found: Mapping[Key, float]) -> tuple[Over, ...]:
        """What is beyond, the farthest first."""
        above = (Over(key, x, self.allowed[key]) for key, x in found.items())
        far = [one for one in above if not one.found <= one.allowed]
        return tuple(sorted(far, key=lambda one: -_times(one)))

    @property
    def blind(self) -> tuple[str, ...]:
        """Parameters whose gradient rounding hides: one that is counted twice would pass."""
        return tuple(
            n for (n, what), x in self.allowed.items() if what == "ratio" and not x <= TELLS
        )


def _times(one: Over) -> float:
    return one.found / one.allowed if isfinite(one.found) and one.allowed else inf


def numbers(found: Comparison) -> dict[Key, float]:
    """All that is compared, by key."""
    made = {("", "loss"): found.loss, ("", "norm"): found.norm}
    for row in found.rows:
        if row.ratio is not None:
            made[row.name, "ratio"] = abs(row.ratio - 1)
        made[row.name, "gradient"] = row.gradient
        made[row.name, "weight"] = row.weight
    return made


class Moved:
    """Plain runs whose results are moved, as many as are asked for. one: how far that of a seed is
    from the run that is not moved, by key."""

    def __init__(self, one: Callable[[int], Mapping[Key, float]]) -> None:
        self._one = one
        self._runs: list[Mapping[Key, float]] = []

    def bounds(self, runs: int) -> Bounds:
        """From so many of them."""
        self._runs.extend(self._one(seed) for seed in range(len(self._runs), runs))
        squares: dict[Key, float] = {}
        for run in self._runs[:runs]:
            for key, x in run.items():
                squares[key] = squares.get(key, 0.0) + x**2
        allowed = {key: FACTOR * sqrt(x / runs) + LEAST for key, x in squares.items()}
        return Bounds(allowed, runs)

    def judge(self, found: Mapping[Key, float]) -> tuple[Bounds, tuple[Over, ...]]:
        """What is allowed, and what of a run is beyond it."""
        bounds = self.bounds(SAMPLES)
        over = bounds.over(found)
        while over and not any(one.clear for one in over) and bounds.runs < MORE:
            bounds = self.bounds(2 * bounds.runs)
            over = bounds.over(found)
        return bounds, over


def trained(case: Case, truth: Sequence[Step], batches: Sequence[Any]) -> Moved:
    """Those of a case. truth: its plain run in float64."""
    precision = case.plan.precision
    exact = Precision("float64", "float64" if precision.master else None, "float64", "float64")
    inside = case.within(exact)

    def one(seed: int) -> Mapping[Key, float]:
        rounding = Rounding(precision, seed)
        steps = plain.train(inside.plain(exact), inside.recipe, batches, rounding)
        return numbers(compare(steps, truth, precision.compute))

    return Moved(one)
