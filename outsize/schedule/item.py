"""Item: what passes through the pool of the device tier as one thing."""

from __future__ import annotations

import re
from typing import NamedTuple

from outsize.schedule.action import WHOLE, State

_FORM = re.compile(r"(parameters|gradients|optimizer) (\d+)(?:#(\d+))?")


class Item(NamedTuple):
    """A state of a stage, or one part of it: "parameters 3", "optimizer 3#1"."""

    state: State
    stage: int
    part: int = WHOLE

    def __str__(self) -> str:
        name = f"{self.state.value} {self.stage}"
        return name if self.part == WHOLE else f"{name}#{self.part}"

    @staticmethod
    def read(text: str) -> Item:
        """The item that `str` wrote."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} names no item, as 'optimizer 3#1' does")
        state, stage, part = match.groups()
        return Item(State(state), int(stage), WHOLE if part is None else int(part))
