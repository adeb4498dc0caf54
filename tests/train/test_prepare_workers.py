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

<<<<<<< HEAD
=======
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
LOOP = """
import json, os, sys, torch
sys.path[:0] = {paths!r}
from test_prepare_workers import batches, count, loss, network
import outsize
other = os.fork()  # what is imported is imported once
rank = 0 if other else 1
os.environ["RANK"] = str(rank)
torch.set_num_threads(1)
model = network(seed=rank)  # the first worker's weights are everybody's
job = outsize.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss, count=count, clip=0.5,
    zero={zero}, microbatches=2,
)
losses = [float(job.step((x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4])))
          for x, y in batches()]
weights = {{name: w.tolist() for name, w in job.weights()}}
try:
    model.state_dict()
    raise SystemExit("its shares were given out as weights")
except outsize.OutsizeError as error:
    assert "job.state_dict()" in str(error), error
job.close()
assert all(w.isnan().all() for w in model.state_dict().values())
if rank == 0:
    print(json.dumps([losses, weights]))
    assert os.waitpid(other, 0)[1] == 0
"""


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

>>>>>>> 09bccfb (Loops around prepare: states, weights and rows that were dropped without a word)

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
