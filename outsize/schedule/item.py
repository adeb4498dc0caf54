"""Item: what passes through the pool of the device tier as one thing."""

from __future__ import annotations

from typing import NamedTuple

from outsize.schedule.action import WHOLE, State


class Item(NamedTuple):
    """A state of a stage, or one part of it: "parameters 3", "optimizer 3#1"."""

    state: State
    stage: int
    part: int = WHOLE

    def __str__(self) -> str:
        name = f"{self.state} {self.stage}"
        return name if self.part == WHOLE else f"{name}#{self.part}"
