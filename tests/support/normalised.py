"""A small module with batch normalisation, a loss of it and batches, for loops around `prepare`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def loss(output, given):
    return F.cross_entropy(output, given[1])


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=made).double(), torch.randint(0, 3, (8,), generator=made))
        for _ in range(count)
    ]
