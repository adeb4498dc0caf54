"""Parallel adapters: beside a branch a narrow network that takes what the branch takes.

He et al., "Towards a Unified View of Parameter-Efficient Transfer Learning", 2022: beside the
feed-forward network, scaled by 4. The branch takes x and gives y, and y + s (U relu(D x + d) + u)
goes on. U begins as zeros, so that the model begins as it was; D as a low-rank adapter's A does.
What is not linear cannot be merged into weights.

    adapt: {parallel: {size: 64}}                   # in a run's file
    outsize.adapt(module, "parallel", beside=["*.mlp"])

Its weights lie in the residual stream: whole on every worker of a tensor axis. peft has no such
adapter: files are of a peft_type of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.adapter import FORMATS, OWN, Adapted, Naming
from outsize.models.around import BRANCH, Place, surround
from outsize.models.targets import number, stored, texts
from outsize.registry import setting, technique
from outsize.techniques.adapt.serial_adapters import Narrow

KEY, FORMAT = "adapt.parallel", f"{OWN}PARALLEL"


@dataclass(frozen=True)
class Parallel:
    """Beside which branches one stands, how wide it is inside, and what it counts."""

    size: int = setting(64, "features inside the network beside each branch", least=1)
    scale: float = setting(4.0, "what the network gives counts so much", least=0)
    beside: tuple[str, ...] = setting(("mlp",), BRANCH)

    @property
    def places(self) -> tuple[Place, ...]:
        return (Place(f"{KEY}.beside", self.beside, self.around),)

    def around(self, d_in: int, d_out: int) -> Alongside:
        """What is around a branch that takes and gives so many features."""
        return Alongside(d_in, self.size, d_out, self.scale)

    def attach(self, model: nn.Module) -> None:
        surround(model, self.places)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        own = {"target_modules": list(self.beside), "size": self.size, "scale": self.scale}
        return stored(FORMAT, adapted, own)


class Alongside(Narrow):
    """What a branch gives, and `scale` times what the network makes of what the branch took."""

    def __init__(self, d_in: int, size: int, d_out: int, scale: float) -> None:
        super().__init__(d_in, size, d_out, F.relu)
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return torch.add(y, super().forward(x), alpha=self.scale)


def read(found: Mapping[str, Any], naming: Naming) -> Parallel:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    targets = texts(found, "target_modules")
    return Parallel(number(found, "size"), number(found, "scale", float), targets)


FORMATS.add(FORMAT, read)
technique(KEY, Parallel, "trains a narrow network beside branches of the frozen blocks")
