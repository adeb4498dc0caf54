"""The `Linear` seam: a weight that the model multiplies by, and how it uses it.

`use` is what a tensor-parallel layout is derived from: "column" weights make independent outputs
(may be cut along their output), "row" weights consume what column weights made (may be cut along
their input, giving partial sums), "plain" ones stay whole.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from outsize.kernels.linear import GradSink, embedding, linear

Use = Literal["column", "row", "plain"]


class Linear(nn.Module):
    """x (..., d_in) -> (..., d_out); weight (d_out, d_in)."""

    def __init__(self, d_in: int, d_out: int, bias: bool = False, use: Use = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.use: Use = use
        self.sink: GradSink | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.sink)


class Embedding(nn.Module):
    """ids (...) int64 -> (..., d); weight (n, d)."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))
        self.sink: GradSink | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.sink)
