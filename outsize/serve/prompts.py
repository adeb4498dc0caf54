"""Whether the sums of a prompt over a tensor axis are taken beside what is computed: by a forecast.

What a step computes is timed with its sums left out, and some sums by themselves; a step is then
priced as a training step with sums beside it is (outsize/simulate/network.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outsize.collectives import World, everyone
from outsize.parallel.tensor.beside import Prompts
from outsize.simulate.network import together


@dataclass(frozen=True)
class Weighed:
    """Predicted seconds of a step, or of a prompt, with its sums one after the other, and with them
    beside what is computed; meaning: how they are then."""

    at_once: float
    beside: float
    meaning: str

    def times(self, steps: float) -> Weighed:
        """Of so many steps."""
        return replace(self, at_once=steps * self.at_once, beside=steps * self.beside)

    @property
    def gains(self) -> bool:
        """By more than a forecast errs by."""
        from outsize.search.choices import WORTH

        return self.beside < WORTH * self.at_once

    def __str__(self) -> str:
        return f"{self.meaning}: predicted {self.beside:.3g} s instead of {self.at_once:.3g}"


def weighed(way: Prompts, world: World, x_TD: Tensor, computing: float) -> Weighed:
    """Of a step: the same on all workers, who all ask. x_TD: as its hidden states; computing:
    its seconds on this worker, without sums."""
    found = torch.tensor((computing, *way.summed(x_TD)), dtype=torch.float64)
    slowest = everyone(world, "agreement").all_reduce(found, "max")
    own, one_by_one, beside = map(float, slowest)
    return foretold(own, one_by_one, beside, way.meaning)


def foretold(computing: float, one_by_one: float, beside: float, meaning: str) -> Weighed:
    """Of seconds that a step computes, and of its sums either way."""
    at_once, taken = (computing, one_by_one, 0.0), (computing, 0.0, beside)
    return Weighed(together(*at_once), together(*taken), meaning)
