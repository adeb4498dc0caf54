"""The plain loops of other people's recipes: what they compute, and that each learns."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "peers"))

import recipe_loops as loops

VOCABULARY = 40


def loop_of(name, tokens=1024):
    torch.manual_seed(0)
    return loops.RECIPES[name](VOCABULARY, tokens)


@pytest.mark.parametrize("name", loops.RECIPES)
def test_each_learns_what_it_sees(name):
    loop, ids = loop_of(name), torch.arange(64).remainder(VOCABULARY).view(2, 32)
    found = []
    for step in range(6):
        loop.turn(100 + step, 0.1)
        loss = loops.losses(loop.model, ids, torch.roll(ids, -1, 1)) / ids.numel()
        loss.backward()
        for own in loop.optimizers:
            own.step()
            own.zero_grad()
        found.append(loss.item())
    if name != "modded-nanogpt":  # whose tied head begins by saying each token again
        assert found[0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert found[-1] < 0.97 * found[0]
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


@pytest.mark.parametrize("name", loops.RECIPES)
def test_no_token_sees_a_later_one(name):
    loop, ids = loop_of(name), torch.arange(16)[None] % VOCABULARY
    for parameter in loop.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    before = loop.model(ids)
    ids[0, 9] += 1
    after = loop.model(ids)
    assert torch.equal(before[0, :9], after[0, :9]) and not torch.equal(before[0, 9:], after[0, 9:])


def test_each_muon_moves_along_the_polar_factor():
    for shape in ((6, 4), (4, 6)):
        draw = torch.Generator().manual_seed(1)
        weight, gradient = torch.randn(2, *shape, generator=draw)
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        for make, limit in ((loops.Muon, 0.9), (loops.PolarMuon, 0.9)):
            p = torch.nn.Parameter(weight.clone())
            p.grad = gradient.clone()
            make([p], 1.0).step()
            moved = weight - p.detach()
            alike = F.cosine_similarity(moved.flatten(), (u @ v).flatten(), dim=0)
            assert float(alike) > limit
            if make is loops.PolarMuon:
                assert float(moved.norm()) == pytest.approx(2.0, rel=1e-3)  # sqrt(min(m, n))


def test_rates_are_those_that_their_authors_have():
    loop = loop_of("nanochat", 2**19)
    adam, muon = loop.optimizers
    loop.turn(100, 0.2)
    wide = (192 / 768) ** -0.5
    rates = [group["lr"] for group in adam.param_groups]
    assert rates == pytest.approx([0.008 * wide, 0.3 * wide, 0.15 * wide, 0.005, 0.5, 0.2])
    assert muon.param_groups[0]["lr"] == 0.02
    assert muon.param_groups[0]["momentum"] == pytest.approx(0.85 + 0.12 / 4)
    loop.turn(1000, 1.0)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.02 * 0.05)
    assert muon.param_groups[0]["momentum"] == pytest.approx(0.9)
    loop = loop_of("modded-nanogpt")
    loop.turn(0, 1 - 0.5 * 1450 / 5100)
    assert [one.param_groups[0]["lr"] for one in loop.optimizers] == pytest.approx([1.8e-3, 1.8e-4])
