"""What a module has beside its parameters: buffers that its forward reads and changes are those of
a plain loop, recomputed or not, and tensors that are attributes do not stand in a budget's way."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import outsize
from outsize.errors import OutsizeError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Centred(Block):
    """Reads the mean that it moves, and counts; by hand what is no part of autograd's versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("behind", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.behind.data.copy_(self.mean)
        return super().forward(x - self.mean - self.behind)


class Replaced(Centred):
    """Has another tensor for a buffer after each forward."""

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return Block.forward(self, x - self.mean)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.up)


class Normed(Block):
    """Has a weight that is made anew in each forward, and is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up)


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {"in": [torch.full((4,), 0.5, dtype=torch.float64)]}

    def forward(self, x):
        return super().forward(x * self.scales["in"][0])


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(2))).double()


def check(make, **options) -> None:
    twin, model = made(make), made(make)
    data = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    optimizer = torch.optim.AdamW(twin.parameters(), 0.01)
    for x in data:
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        optimizer.step()
    job = outsize.prepare(
        model, torch.optim.AdamW(model.parameters(), 0.01),
        loss=lambda out, _: out.square().mean(), **options,
    )  # fmt: skip
    for x in data:
        job.step(x)
    got = dict(job.weights()) | dict(model.named_buffers())
    for name, want in [*twin.named_parameters(), *twin.named_buffers()]:
        torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-13)
    job.close()


@pytest.mark.parametrize("part", ["block", "up"])
@pytest.mark.parametrize("make", [Centred, Replaced, Spectral])
def test_a_second_forward_reads_the_buffers_of_the_first(make, part) -> None:
    check(make, recompute=(part,))


@pytest.mark.parametrize("make", [Centred, Normed, Scaled])
def test_a_budget_goes_with_any_tensors(make) -> None:
    check(make, memory="1MiB")


def test_what_cannot_be_copied_is_said() -> None:
    block = Block()
    block.lock = threading.Lock()
    job = outsize.prepare(block, "sgd", "1MiB", loss=lambda out, _: out.square().mean())
    with pytest.raises(OutsizeError, match=r"Block cannot be predicted: a copy of it fails .*lock"):
        job.step(torch.randn(2, 4))
