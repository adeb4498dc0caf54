"""Batch normalisation by each microbatch's statistics, on one worker and on several, against a
plain loop over the same microbatches."""

from __future__ import annotations

import pytest
import torch
from threads import play
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.collectives import parse_mesh
from outsize.errors import OutsizeError

ROWS, STEPS, RATE, MOMENTUM = 12, 2, 0.05, 0.3
NAMED = ("microbatch-statistics",)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4, momentum=MOMENTUM)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Net(nn.Module):
    """With a normalisation before the first block, which every worker runs that needs it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.BatchNorm1d(4, momentum=None)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(2))


def made():
    torch.manual_seed(0)
    return Net().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(ROWS, 4, 5, dtype=torch.float64, generator=generator)
        yield x, torch.randint(0, 3, (ROWS,), generator=generator)


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum")


def plain(count):
    """Losses, weights and running statistics after steps of so many microbatches: averages of what
    its normalisations were given."""
    model, losses, given = made(), [], {}
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm1d)}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, args, name=name: given[name].append(args[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    running = {n: torch.zeros(2, 4, dtype=torch.float64) for n in norms}
    for one in running.values():
        one[1] = 1.0
    for step, (x, y) in enumerate(batches(), start=1):
        given |= {name: [] for name in norms}
        optimizer.zero_grad()
        parts = zip(x.chunk(count), y.chunk(count), strict=True)
        total = sum(loss(model(a), (a, b)) for a, b in parts) / ROWS
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
        for name, inputs in given.items():
            both = [torch.stack((i.mean((0, 2)), i.var((0, 2)))) for i in inputs]
            share = 1 / step if name == "stem" else MOMENTUM
            running[name].lerp_(torch.stack(both).mean(0).detach(), share)
    return losses, dict(model.named_parameters()), running


WAYS = {
    "alone": ("data=1", 3, {}, 3),
    "computed again": ("data=1", 3, {"recompute": ("block",)}, 3),
    "pipeline": ("pipeline=2", 4, {"pipeline": "gpipe"}, 4),
    "two copies of each stage": ("pipeline=2", 4, {"pipeline": "chimera"}, 4),
    "rows on two workers": ("data=2", 2, {}, 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_microbatch_by_its_own_and_one_average_a_step(way, near):
    mesh, microbatches, options, every = WAYS[way]
    losses, weights, running = plain(every)
    mesh = parse_mesh(mesh)
    models = [made() for _ in range(mesh.size)]

    def work(world):
        model, own = models[world.rank], ROWS // mesh.data
        place = mesh.index("data", world.rank) * own
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        settings = {"microbatches": microbatches, "mesh": mesh, "approximate": NAMED} | options
        job = outsize.prepare(
            model, optimizer, loss=loss, count=lambda batch: float(len(batch[1])), **settings
        )
        found = [float(job.step((x[place:][:own], y[place:][:own]))) for x, y in batches()]
        assert job.plan.approximate == NAMED
        state = job.state_dict()
        job.close()
        return found, state

    for found, state in play(mesh, near(work)) if mesh.size > 1 else [work(Alone())]:
        assert found == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(state["weights"][name], weight.detach(), rtol=1e-10, atol=0)
        for name, both in running.items():
            for kind, wanted in zip(("running_mean", "running_var"), both, strict=True):
                torch.testing.assert_close(state["buffers"][f"{name}.{kind}"], wanted)
            assert state["buffers"][f"{name}.num_batches_tracked"] == STEPS


class Alone:
    rank = 0


REFUSED = {
    "statistics of a whole batch": (
        {"microbatches": 2}, r"use microbatches=1, or name\s+microbatch-statistics",
    ),
    "one microbatch": ({"approximate": NAMED}, "nothing would be done: it is for batch"),
    "another name": ({"approximate": ("zeroth-order",)}, "approximate holds 'zeroth-order'"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_would_change_it_unasked_is_refused(options, said):
    with pytest.raises(OutsizeError, match=said):
        outsize.prepare(made(), "adamw", loss=loss, count=len, **options)
