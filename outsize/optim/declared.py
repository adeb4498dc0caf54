"""What an optimizer declares of each of its states: type, size, first value.

Chunks, pools, tiers, cuts over workers, checkpoints and forecasts follow from this alone
(outsize/schedule/items.py), so that a state need not be as large as the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from outsize.errors import OutsizeError

Shape = tuple[int, ...]
Size = Callable[[Shape], int]
WHOLE = 0  # the grain of an optimizer that updates whole parameters


@dataclass(frozen=True)
class StateSpec:
    """One state. name: as checkpoints have it. dtype: None for what the plan's precision says.

    per: the state has one element for each so many of a parameter's, from its first one on; the
    last may stand for fewer. initial: the value of all of them before the first update. size: of a
    state of another size, its elements for a whole parameter of a shape; at grain WHOLE alone.
    """

    name: str
    dtype: torch.dtype | None = None
    per: int = 1
    initial: float = 0.0
    size: Size | None = None

    @property
    def shaped(self) -> bool:
        """Whether it has the parameter's shape, and is cut as that is; else it is 1-D and whole."""
        return self.per == 1 and self.size is None

    def elements(self, shape: Shape) -> int:
        """How many it has for a whole parameter of a shape."""
        return -(-prod(shape) // self.per) if self.size is None else self.size(shape)


def named(specs: tuple[StateSpec, ...]) -> tuple[str, ...]:
    """The names of some states."""
    return tuple(spec.name for spec in specs)


def check_numbers(**values: float | tuple[float, ...]) -> None:
    """Refuse settings that make no sense: betas and momentum are parts of 1, the others are not
    negative."""
    for name, value in values.items():
        several = value if isinstance(value, tuple) else (value,)
        part = name in ("betas", "momentum")
        if not all(0 <= number < (1 if part else math.inf) for number in several):
            wanted = "0 or more and less than 1" if part else "a number of 0 or more"
            shown = list(value) if isinstance(value, tuple) else f"{value:g}"
            each = " each" if isinstance(value, tuple) else ""
            raise OutsizeError(f"optimizer: {name} is {shown}; expected {wanted}{each}")


def check_grain(grain: int, specs: tuple[StateSpec, ...]) -> None:
    """Assert that no element of a state stands for elements that cuts may part."""
    for spec in specs:
        assert grain == WHOLE or (spec.size is None and grain % spec.per == 0), (grain, spec)
