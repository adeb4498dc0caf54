"""Normalisation of the last dim, in float32 at least: RMS norm and layer norm (Ba et al., 2016).

D normalised size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.kernels.norm import rms_norm, upcast
from outsize.models.config import NormFacts

__all__ = ["Norm", "upcast"]


class Norm(nn.Module):
    """x (..., D) -> (..., D), any float dtype; weight (D) [and bias (D) for a layer norm]."""

    def __init__(self, size: int, facts: NormFacts) -> None:
        super().__init__()
        self.facts = facts
        self.size = size
        with_bias = facts.affine and facts.kind == "layer"
        self.weight = nn.Parameter(torch.empty(size)) if facts.affine else None
        self.bias = nn.Parameter(torch.empty(size)) if with_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.facts.kind == "layer":
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.facts.eps)
        assert self.weight is not None, "an RMS norm has a weight"
        return rms_norm(x, self.weight, self.facts.eps, 1.0 - self.facts.unit)
