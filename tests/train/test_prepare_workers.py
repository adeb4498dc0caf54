"""Somebody's own loop over two workers, as torchrun would start them, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from network_workers import batches, network, worker
from torch import nn
from torch.nn import functional as F
from torchrun import free_port, started

import outsize
from outsize.errors import OutsizeError


def plain():
    model = network(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        mean = F.cross_entropy(model(x), y, ignore_index=-100)
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("zero", [3])
def test_two_workers_give_the_numbers_of_plain_pytorch(zero):
    said = started(worker, 2, free_port(), zero)
    wanted, parameters = plain()
    for losses, weights in said():
        assert losses == pytest.approx(wanted, rel=1e-10)
        for name, parameter in parameters.items():
            mine = torch.tensor(weights[name], dtype=torch.float64)
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-10, atol=1e-10)


def test_what_cannot_be_is_refused():
    model = network(seed=0)
    with pytest.raises(OutsizeError, match="mesh is data=2 without loss and count"):
        outsize.prepare(model, "adamw", mesh="data=2")
    with pytest.raises(OutsizeError, match="sequence_parallel is for decoders"):
        outsize.prepare(model, "adamw", mesh="tensor=2", sequence_parallel=True)
    with pytest.raises(OutsizeError, match="'host' is a tier and this is a Network"):
        outsize.prepare(model, "adamw", "1GiB", mesh="tensor=2", host_memory="1GiB")
    with pytest.raises(OutsizeError, match="zero is 4"):
        outsize.prepare(model, "adamw", zero=4)
