"""How long a run is, in passes over its data: `train.epochs: 3`.

The data are read before the length is known; their rows, permuted anew in each pass, are numbered
over the whole run (outsize/data/stream.py). A run that goes on may have more of them, or other
rows a step: its length is then that of the rows which are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outsize.data import TrainStream
from outsize.errors import OutsizeError, counted
from outsize.registry import setting, technique

KEY = "train.epochs"


@dataclass(frozen=True)
class Epochs:
    count: float = setting(
        1.0, "passes over the training data, instead of steps", least=0, may_change=True
    )

    def __post_init__(self) -> None:
        if not self.count > 0:
            raise OutsizeError(f"{KEY} is {self.count:g}; expected a number above 0")

    def steps(self, stream: TrainStream, done: int = 0, sample: int = 0) -> tuple[int, str]:
        """The steps that read every row so often, and why they are so many. done: of them, in
        which `sample` rows were read."""
        rows = math.ceil(self.count * stream.rows_per_epoch) - sample
        steps = done + max(0, -(-rows // stream.rows))
        return steps, f"{self.count:g} epochs of {counted(stream.rows_per_epoch, 'row')}"


technique(KEY, Epochs, "passes over the data, instead of steps", short="count")
