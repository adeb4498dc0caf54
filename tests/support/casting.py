"""A module whose forward computes in bfloat16 by autocast, under `prepare` and in a plain loop."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outsize

RATE, ROWS = 0.1, 8
Numbers = tuple[list[float], dict[str, Tensor]]  # losses and weights


class Noting(nn.Module):
    """Passes on what comes, and notes its type."""

    seen: ClassVar[set[torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.dtype)
        return x


class Casting(nn.Module):
    """Weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), Noting())
            for _ in range(3)
        )
        self.leave = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.enter(x)
            for block in self.blocks:
                x = x + block(x)
            return self.leave(x)


def made(where: torch.device) -> Casting:
    torch.manual_seed(0)
    return Casting().to(where)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 8, generator=draw), torch.randint(0, 5, (ROWS,), generator=draw))
        for _ in range(3)
    ]


def summed(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.float(), batch[1], reduction="sum")


def plain(where: torch.device, microbatches: int = 1) -> Numbers:
    """By autograd and torch.optim on a device."""
    model = made(where)
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for batch in batches():
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(x.to(where).chunk(microbatches) for x in batch), strict=True):
            loss = summed(model(part[0]), part) * (1 / ROWS)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {n: p.detach().cpu() for n, p in model.named_parameters()}


def prepared(where: torch.device, **options: Any) -> Numbers:
    model = copy.deepcopy(made(where))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    count = lambda batch: float(len(batch[1]))  # noqa: E731
    job = outsize.prepare(model, optimizer, loss=summed, count=count, **options)
    losses = [float(job.step(batch)) for batch in batches()]
    weights = {n: w.detach().cpu().clone() for n, w in job.weights()}
    job.close()
    return losses, weights


def assert_alike(found: Numbers, expected: Numbers) -> None:
    """What runs in bfloat16 rounds to 2^-9: the gradients of a block's input and of what goes past
    it are rounded one by one here, and their sum in a plain loop."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=2e-3, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-3)


def same(found: Numbers, other: Numbers) -> bool:
    """Bit for bit."""
    return found[0] == other[0] and all(torch.equal(w, other[1][n]) for n, w in found[1].items())
