"""What automatic tensor parallelism must leave whole: layers whose names promise what their code
does not keep."""

import copy

import pytest
import torch
from threads import play
from torch import nn
from torch.nn import functional as F

from outsize.collectives import Mesh, along
from outsize.parallel.automatic.apply import spread
from outsize.parallel.automatic.derive import derive

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Plain(nn.Module):
    """A feed-forward block with the usual names."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def between(self, h):
        return F.silu(h)

    def forward(self, x):
        return x + self.down_proj(self.between(self.up_proj(x)))


class Normed(Plain):
    def between(self, h):
        return F.layer_norm(h, (32,))


class Rolled(Plain):
    """Features move to another place: to another worker's part."""

    def between(self, h):
        return h.roll(1, -1)


class Sorted(Plain):
    def between(self, h):
        return h.sort(-1).values


class Weighted(Plain):
    """Each feature is multiplied by a number of its own, which is whole on every worker."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(32))

    def between(self, h):
        return F.silu(h) * self.factor


class Halves(Plain):
    """The two halves are swapped: fine in segments of halves, with both of each on every worker."""

    def between(self, h):
        a, b = h.chunk(2, -1)
        return torch.cat((b, a), -1)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down_proj = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class Twice(Plain):
    """The same weight is used again, on what all workers have."""

    def forward(self, x):
        h = super().forward(x)
        return h + self.up_proj(x).mean(-1, keepdim=True)


class Counting(Plain):
    """The number of features is in the numbers: with half of them, something else comes out."""

    def between(self, h):
        return h / h.shape[-1]


class Peeking(Plain):
    def between(self, h):
        return h if self.training else h * h[..., :1]


class Attention(nn.Module):
    """Heads that are mixed with one another (talking heads) when asked."""

    def __init__(self, talk):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.v_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.talk = nn.Parameter(torch.eye(4) + 0.1) if talk else None

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        score = (q @ k.mT).softmax(-1)
        if self.talk is not None:
            score = torch.einsum("bhst,gh->bgst", score, self.talk)
        return x + self.o_proj((score @ v).transpose(1, 2).flatten(-2))


def model_of(block):
    torch.manual_seed(1)
    return nn.Sequential(*(block() for _ in range(2))).double()


CASES = {
    "plain": (Plain, True),
    "gated, one weight": (Gated, True),
    "attention": (lambda: Attention(False), True),
    "norm between": (Normed, False),
    "rolled": (Rolled, False),
    "sorted": (Sorted, False),
    "whole factor": (Weighted, False),
    "swapped halves": (Halves, None),
    "column used elsewhere": (Twice, False),
    "count in the numbers": (Counting, False),
    "peeking": (Peeking, None),
    "talking heads": (lambda: Attention(True), False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_is_spread_is_right_and_the_rest_is_whole(name, training):
    block, expected = CASES[name]
    plain = model_of(block).train(training)
    derived = derive(plain, 2, (X,), blocks="*")
    groups = sum(len(d.groups) for d in derived.values())
    if expected is not None:
        assert bool(groups) == expected, next(iter(derived.values())).left
    wanted = plain(X).square().sum()
    wanted.backward()

    def work(world):
        axis = along(world, "tensor")
        model = copy.deepcopy(plain)
        model.zero_grad()
        cuts = spread(model, derived, axis)
        loss = model(X).square().sum()
        loss.backward()
        for key, p in model.named_parameters():
            grad = axis.all_reduce(p.grad) if cuts[key].partial else p.grad
            whole = cuts[key].of(plain.get_parameter(key).grad)
            torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-10)
        return loss.detach()

    for loss in play(Mesh(tensor=2), work):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=1e-10)


def test_sizes_that_the_workers_do_not_divide_stay_whole():
    derived = derive(model_of(Plain), 3, (X,), blocks="*")
    assert all(not d.groups for d in derived.values())
    assert "which 3 do not divide" in derived["0"].left["down_proj"]
    assert derive(model_of(Plain), 1, (X,), blocks="*")["0"].groups == ()


def test_the_reason_is_given():
    left = derive(model_of(Normed), 2, (X,), blocks="*")["0"].left["down_proj"]
    assert "layer_norm over dim 2, which is sharded" in left and "missing: all_reduce" in left
