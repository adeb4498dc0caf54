"""Workers over a module of somebody's own, in processes of their own. A module that such a process
can import by its name."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.errors import OutsizeError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(12, 3)

    def forward(self, x, targets=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def network(seed: int) -> Network:
    torch.manual_seed(seed)
    return Network().double()


def batches():
    """Eight rows a step; some have no target."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        y[5:7] = -100
        yield x, y


def loss(output, batch):
    return F.cross_entropy(output, batch[1], ignore_index=-100, reduction="sum")


def count(batch) -> float:
    return float((batch[1] != -100).sum())


def worker(rank, port, zero, pipe):
    """A process that torchrun has started, so to say: it sends losses and weights."""
    torch.set_num_threads(1)
    place = {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = network(seed=rank)  # the first worker's weights are everybody's
    job = outsize.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss, count=count, clip=0.5,
        zero=zero, microbatches=2,
    )  # fmt: skip
    mine = slice(rank * 4, rank * 4 + 4)
    losses = [float(job.step((x[mine], y[mine]))) for x, y in batches()]
    weights = {name: w.tolist() for name, w in job.weights()}
    with pytest.raises(OutsizeError, match=r"job\.state_dict\(\)"):  # shares are no weights
        model.state_dict()
    job.close()
    assert all(w.isnan().all() for w in model.state_dict().values())
    pipe.send((losses, weights))
