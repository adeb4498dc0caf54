"""Adopted modules train as in a plain loop: same losses and weights at 1e-10 in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.train.prepare import prepare

STEPS = 6


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(y)) + x


class ResNet(nn.Module):
    """Stages of residual units with in-place glue between them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(6), Residual(6))
        self.down = nn.Conv2d(6, 8, 1, stride=2)
        self.layer2 = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer1(self.stem(x).relu_())
        x = self.layer2(self.down(x.relu_()))
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos = nn.Parameter(torch.randn(1, 5, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(
            16, 2, 24, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


class EncoderDecoder(nn.Module):
    """Every decoder block reads the same normalised encoder output; a skip joins the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(12, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, source, target):
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        memory = self.norm(memory)
        start = self.embed(target)
        x = start
        for block in self.decoder:
            x = block(x, memory)
        return (x + start + memory.mean(1, keepdim=True)) @ self.embed.weight.t()


def cross_entropy(output, batch):
    target = batch[-1] if isinstance(batch, tuple) else batch["y"]
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


class WithTarget(nn.Module):
    """Lets a model be called with its target, which the loss reads from the batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args[:-1])


def images(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, generator=g, dtype=torch.float64)
    return (x, torch.randint(0, 5, (4,), generator=g))


def sentences(seed):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 11, (3, 6), generator=g) for _ in range(3))


def plain(model, data, optimizer_of, loss, clip=None):
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for batch in data:
        optimizer.zero_grad()
        value = loss(model(*batch), batch)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, model


CASES = {
    "resnet": (ResNet, images),
    "vit": (ViT, images),
    "encoder-decoder": (EncoderDecoder, sentences),
}


@pytest.mark.parametrize("recompute", [(), ("block",)])
@pytest.mark.parametrize("name", CASES)
def test_adopted_models_train_as_in_a_plain_loop(name, recompute):
    make, sample = CASES[name]
    model = WithTarget(make()).double()
    data = [sample(seed) for seed in range(STEPS)]

    def optimizer_of(
        parameters,
    ):  # eps: a key's bias has no gradient but rounding, which 1e-8 shows
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05, eps=1e-6)

    torch.manual_seed(5)
    losses, expected = plain(model, data, optimizer_of, cross_entropy, clip=0.7)
    torch.manual_seed(5)
    job = prepare(
        model, optimizer_of(model.parameters()), loss=cross_entropy, clip=0.7, recompute=recompute
    )
    got = [float(job.step(batch)) for batch in data]
    assert got == pytest.approx(losses, rel=1e-10)
    for (n, a), b in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * max(1e-3, float(b.abs().max())), n
    job.close()
    model.eval()(*data[0])  # an ordinary module again


def test_a_scheduler_and_groups_of_the_users_optimizer_are_kept():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    ).double()
    twin = copy.deepcopy(model)

    def optimizer_of(m):
        parts = list(m.parameters())
        groups = [{"params": parts[:2], "lr": 0.1}, {"params": parts[2:], "weight_decay": 0.3}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    data = [torch.randn(5, 4, dtype=torch.float64) for _ in range(STEPS)]
    optimizer, schedule = optimizer_of(twin)
    for x in data:
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        optimizer.step()
        schedule.step()
    optimizer, schedule = optimizer_of(model)
    job = prepare(model, optimizer, loss=lambda out, batch: out.square().mean())
    for x in data:
        job.step(x)
        schedule.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_microbatches_weigh_by_count():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    twin = copy.deepcopy(model)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
    y[1:5] = -100
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    loss = F.cross_entropy(twin(x), y)
    loss.backward()
    optimizer.step()
    job = prepare(
        WithTarget(model), "adamw", microbatches=3, count=lambda b: int((b[1] >= 0).sum()),
        loss=lambda out, b: F.cross_entropy(out, b[1], reduction="sum"), blocks="inner.*",
    )  # fmt: skip
    assert float(job.step((x, y), lr=0.1)) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert job.plan.microbatches == 3


def test_unused_parameters_are_left_alone_as_torch_leaves_them():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
            self.extra = nn.Linear(4, 4)

        def forward(self, x, use):
            for block in self.blocks:
                x = block(x)
            return (self.extra(x) if use else x).square().mean()

    model = Sometimes().double()
    twin = copy.deepcopy(model)
    data = [(torch.randn(3, 4, dtype=torch.float64), step % 3 == 1) for step in range(STEPS)]
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.2)
    for batch in data:
        optimizer.zero_grad()
        twin(*batch).backward()
        optimizer.step()
    job = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2))
    for batch in data:
        job.step(batch)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("frozen", ["stem", "layer1", "layer2.0"])
def test_frozen_parts(frozen):
    model = WithTarget(ResNet()).double()
    for p in model.inner.get_submodule(frozen).parameters():
        p.requires_grad_(False)
    data = [images(seed) for seed in range(3)]

    def optimizer_of(parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)

    losses, _ = plain(model, data, optimizer_of, cross_entropy)
    job = prepare(model, optimizer_of(model.parameters()), loss=cross_entropy)
    assert [float(job.step(b)) for b in data] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("theirs", [True, False])
def test_what_trains_may_change_between_steps(theirs):
    """Layers are thawed one by one and one is frozen again; states go on, new ones begin."""
    model = WithTarget(ResNet()).double()
    twin = copy.deepcopy(model)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(twin.parameters(), **settings)
    mine = (
        torch.optim.AdamW(model.parameters(), **settings) if theirs else AdamW(1e-2, weight_decay=0)
    )
    job = prepare(model, mine, loss=cross_entropy)
    turns = [("stem", "layer1"), ("stem",), (), ("layer2.0",), ("layer1",)]
    for step, frozen in enumerate(turns):
        for one in (model, twin):
            for name, p in one.inner.named_parameters():
                p.requires_grad_(not name.startswith(frozen))
        batch = images(step)
        optimizer.zero_grad()
        wanted = cross_entropy(twin(*batch), batch)
        wanted.backward()
        optimizer.step()
        assert float(job.step(batch)) == pytest.approx(float(wanted.detach()), rel=1e-10)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    if theirs:
        found, wanted = (one.state_dict()["state"] for one in (mine, optimizer))
        assert {n: float(s["step"]) for n, s in found.items()} == {
            n: float(s["step"]) for n, s in wanted.items()
        }


def test_what_trains_is_fixed_where_states_lie_on_tiers():
    model = WithTarget(ResNet()).double()
    model.inner.layer1.requires_grad_(False)
    job = prepare(model, "adamw", "8MiB", loss=cross_entropy, host_memory="8MiB")
    job.step(images(0))
    model.inner.layer1.requires_grad_(True)
    with pytest.raises(
        OutsizeError, match=r"layer1.*requires_grad is True, and was False when the"
    ):
        job.step(images(1))
    model.inner.layer1.requires_grad_(False)
    job.step(images(1))


def test_memory_is_predicted_to_the_byte_and_kept():
    model = WithTarget(ViT())
    batch = (torch.randn(32, 3, 8, 8), torch.randint(0, 5, (32,)))
    free = prepare(copy.deepcopy(model), "adamw", "1GiB", loss=cross_entropy)
    free.step(batch)
    budget = free.forecast.peak - 50_000
    job = prepare(model, "adamw", budget, loss=cross_entropy)
    for _ in range(3):
        job.step(batch)
    assert any(stage.whole for stage in job.plan.stages)
    measured = max(event.peak for event in job.report.trace.events)
    assert 0.95 * job.forecast.peak <= measured <= job.forecast.peak <= budget


def test_memory_of_a_native_decoder_is_predicted_to_the_byte():
    """Over a copy of it, whose kernels are the model's own."""
    job = prepare(build(parse(PRESETS["tiny"]), seed=0), "adamw", "1GiB")
    for _ in range(2):
        job.step(torch.randint(0, 256, (2, 32)))
    measured = {e.stage: e.peak for e in job.report.trace.events if e.kind == "BACKWARD"}
    found = {e.stage: e.peak for e in job.forecast.trace.events if e.kind == "BACKWARD"}
    assert len(found) == 4 and found == measured


@pytest.mark.parametrize(("said", "meant"), [("prcision", "precision"), ("microbatch", "microb")])
def test_an_option_that_is_none_is_refused_with_the_nearest(said, meant):
    with pytest.raises(OutsizeError, match=f"prepare: {said} is no option; did you mean '{meant}"):
        prepare(nn.Linear(2, 2), "adamw", **{said: 1})


def test_a_budget_that_nothing_fits_says_what_is_missing():
    model = WithTarget(ViT())
    batch = (torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,)))
    parameters = sum(p.numel() for p in model.parameters())
    with pytest.raises(OutsizeError, match="bytes missing"):
        prepare(model, "adamw", parameters * 8)
    job = prepare(model, "adamw", parameters * 17, loss=cross_entropy)
    with pytest.raises(OutsizeError, match=r"bytes missing; the smallest plan needs .* set memory"):
        job.step(batch)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x.sum()


def test_models_that_cannot_be_split_say_why_naming_the_module():
    with pytest.raises(OutsizeError, match="Linear cannot be split"):
        prepare(nn.Linear(2, 2), "adamw", mesh="tensor=2")
    with pytest.raises(OutsizeError, match=r"block 'blocks\.0' is called again"):
        prepare(Twice(), "adamw", blocks="blocks.*").step(torch.randn(2, 4))
    with pytest.raises(OutsizeError, match="name no module"):
        prepare(Twice(), "adamw", blocks="layers.*")
    with pytest.raises(OutsizeError, match=r"blocks is \[\]; expected path patterns"):
        prepare(Twice(), "adamw", blocks=[])
    with pytest.raises(OutsizeError, match=r"expected a scalar|no loss"):
        prepare(ResNet(), "adamw").step(torch.randn(2, 3, 8, 8))
    with pytest.raises(OutsizeError, match="BatchNorm2d"):
        prepare(ResNet(), "adamw", loss=cross_entropy, count=len, microbatches=2)
