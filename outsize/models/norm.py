"""Normalisation of the last dim, in float32 at least: RMS norm and layer norm (Ba et al., 2016).

D normalised size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.kernels.norm import rms_norm, upcast
from outsize.models.config import NormFacts
from outsize.models.declared import STREAM, Declared, Initial, Lies

__all__ = ["Norm", "Scale", "Scaled", "upcast"]


class Scaled(Protocol):
    """What a norm multiplies by, and adds."""

    @property
    def facts(self) -> NormFacts: ...

    @property
    def weight(self) -> Tensor | None: ...

    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True, eq=False)
class Scale:
    """The same by itself: of one of several norms that lie in one parameter."""

    facts: NormFacts
    weight: Tensor | None
    bias: Tensor | None


class Norm(nn.Module):
    """x (..., D) -> (..., D), any float dtype; weight (D) [and bias (D) for a layer norm]. run: how
    its statistic is taken. lies: how the weight is cut."""

    facts: NormFacts
    lies: Lies
    size: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    run: Callable[[Scaled, Tensor], Tensor]

    def __init__(self, size: int, facts: NormFacts, lies: Lies = STREAM) -> None:
        super().__init__()
        vars(self).update(  # at once, as of a Linear
            facts=facts, lies=lies, size=size, weight=None, bias=None, run=normed
        )
        if facts.affine:
            self.weight = nn.Parameter(torch.empty(size))
        if facts.affine and facts.kind == "layer":
            self.bias = nn.Parameter(torch.empty(size))

    @property
    def wide(self) -> bool:
        """Whether its statistic is of what lies on several workers, where its weight is cut."""
        return self.lies.unit is not None

    def declare(self, leaf: str) -> Declared:
        return Declared(Initial(value=self.facts.unit if leaf == "weight" else 0.0), self.lies)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def normed(norm: Scaled, x: Tensor) -> Tensor:
    """All of the vector is here."""
    if norm.facts.kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.facts.eps)
    weight, facts = norm.weight, norm.facts
    assert weight is not None, "an RMS norm has a weight"
    return rms_norm(x, weight, facts.eps, 1.0 - facts.unit)
