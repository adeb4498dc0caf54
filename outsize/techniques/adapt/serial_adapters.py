"""Serial adapters: behind a branch a narrow network, whose output is added to what it takes.

Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", 2019: behind attention and behind
the feed-forward network; Pfeiffer et al., "AdapterFusion", 2021: behind the latter alone. The
branch gives y, and y + U gelu(D y + d) + u goes on. U begins as zeros, so that the model begins as
it was; D as a low-rank adapter's A does. What is not linear cannot be merged into weights.

    adapt: {serial: {size: 64, behind: [mlp]}}      # in a run's file
    outsize.adapt(module, "serial", behind=["*.mlp"])

Its weights lie in the residual stream: whole on every worker of a tensor axis. peft has no such
adapter: files are of a peft_type of our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.models.adapter import FORMATS, OWN, Adapted, Naming
from outsize.models.around import BRANCH, Place, surround
from outsize.models.declared import STREAM, Declared, Initial
from outsize.models.linear import Linear
from outsize.models.targets import number, stored, texts
from outsize.registry import setting, technique

KEY, FORMAT = "adapt.serial", f"{OWN}SERIAL"
BOTH = ("attention", "mlp")


@dataclass(frozen=True)
class Serial:
    """Behind which branches one stands, and how wide it is inside."""

    size: int = setting(64, "features inside the network behind each branch", least=1)
    behind: tuple[str, ...] = setting(BOTH, BRANCH)

    @property
    def places(self) -> tuple[Place, ...]:
        return (Place(f"{KEY}.behind", self.behind, self.around),)

    def around(self, _: int, d_out: int) -> Behind:
        """What is around a branch that gives so many features."""
        return Behind(d_out, self.size)

    def attach(self, model: nn.Module) -> None:
        surround(model, self.places)

    def to_json(self, adapted: Adapted) -> dict[str, Any]:
        return stored(FORMAT, adapted, {"target_modules": list(self.behind), "size": self.size})


class Projection(Linear):
    """A Linear with a bias in the residual stream. file: its name in files; bound: of its first
    weights, uniform around 0; the bias begins as zeros."""

    def __init__(self, d_in: int, d_out: int, file: str, bound: float) -> None:
        super().__init__(d_in, d_out, bias=True)
        self.file, self.bound = file, bound

    def declare(self, leaf: str) -> Declared:
        start = Initial(bound=self.bound if leaf == "weight" else 0.0)
        return Declared(start, STREAM, f"{self.file}.{leaf}")


class Narrow(nn.Module):
    """x (..., d_in) -> U act(D x + d) + u, (..., d_out), with `size` features inside."""

    def __init__(
        self, d_in: int, size: int, d_out: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.down = Projection(d_in, size, "down", 1 / math.sqrt(d_in))
        self.up = Projection(size, d_out, "up", 0.0)
        self.activation, self.sizes = activation, (d_in, d_out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.activation(self.down(x)))
        return y


class Behind(Narrow):
    """Of what a branch gives, that and what the network makes of it."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size, width, F.gelu)

    def forward(self, _: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return torch.add(y, super().forward(y))


def read(found: Mapping[str, Any], naming: Naming) -> Serial:
    """The adapter that an adapter_config.json says. OutsizeError for what is not one."""
    return Serial(number(found, "size"), texts(found, "target_modules"))


FORMATS.add(FORMAT, read)
technique(KEY, Serial, "trains a narrow network behind each branch of the frozen blocks")
