"""`prepare` with tiers: somebody's own model whose states do not fit in memory trains as in a plain
loop; what rests below cannot be computed with by mistake."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from rates import known_hardware
from torch import nn
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier
from outsize.memory import Ledger
from outsize.train.prepare import Prepared, prepare

STEPS = 2


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure this machine and its disk anew in each test takes seconds."""
    rate = Rate(1e9, "B/s", "test", "2026-11-21")
    monkeypatch.setattr("outsize.train.prepared.making.probe", lambda device: known_hardware())
    monkeypatch.setattr(
        "outsize.train.tiers.measured", lambda spec, date: Tier(spec.name, spec.bytes, rate, rate)
    )


class Unit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)) + x


class ResNet(nn.Module):
    def __init__(self, units: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.units = nn.Sequential(*(Unit(32) for _ in range(units)))
        self.head = nn.Linear(32, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.units(self.stem(x)).mean((2, 3))), y)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 48, 4, stride=4)
        self.pos = nn.Parameter(torch.randn(1, 4, 48) * 0.1)
        layer = nn.TransformerEncoderLayer(48, 2, 96, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(48, 5)

    def forward(self, x, y):
        x = self.encoder(self.patch(x).flatten(2).transpose(1, 2) + self.pos)
        return F.cross_entropy(self.head(x[:, 0]), y)


def gpt2() -> nn.Module:
    hf = pytest.importorskip("transformers")
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=48, n_layer=3, n_head=2, vocab_size=64))


def images(seed: int):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 8, 8, generator=g, dtype=torch.float64)
    return (x, torch.randint(0, 5, (2,), generator=g))


def causal(seed: int):
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


CASES = {"resnet": (lambda: ResNet(3), images), "vit": (ViT, images), "gpt2": (gpt2, causal)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Gradients that are zero but for rounding (a key's bias) stay so: eps is far above them.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05, eps=1e-4)


def plain(model: nn.Module, data) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for batch in data:
        optimizer.zero_grad()
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = getattr(out, "loss", out)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def states(model: nn.Module) -> int:
    """Bytes of parameters, gradients and two moments in float64."""
    return sum(p.numel() for p in model.parameters()) * 8 * 4


@pytest.mark.parametrize("name", CASES)
def test_a_model_larger_than_memory_trains_as_in_a_plain_loop(name, tmp_path) -> None:
    make, sample = CASES[name]
    torch.manual_seed(1)
    model = make().double()
    twin = copy.deepcopy(model)
    data = [sample(seed) for seed in range(STEPS)]
    torch.manual_seed(5)
    losses = plain(twin, data)
    budget = int(0.6 * states(model))
    torch.manual_seed(5)
    job = prepare(model, optimizer_of(model), memory=budget, disk=f"{tmp_path}:1GiB")
    assert [float(job.step(batch)) for batch in data] == pytest.approx(losses, rel=1e-10)
    assert job.forecast is not None and job.forecast.peak <= budget
    assert sum(job.forecast.below.values()) >= states(model) - budget
    expected = dict(twin.named_parameters())
    for path, weight in job.weights():
        torch.testing.assert_close(weight, expected[path].detach(), rtol=1e-10, atol=1e-12)
    job.close()
    assert list(tmp_path.iterdir()) == []


def streamed(tmp_path, share: float = 0.45) -> tuple[Prepared, nn.Module]:
    """A model of which parameters, too, rest on the disk."""
    torch.manual_seed(1)
    model = ResNet().double().eval()
    job = prepare(
        model, optimizer_of(model), memory=int(share * states(model)), disk=f"{tmp_path}:1GiB"
    )
    job.step(images(0))
    assert any(stage.rest.parameters == "disk" for stage in job.plan.stages)
    return job, model


def test_it_is_evaluated_where_it_rests_and_its_own_forward_is_refused(tmp_path) -> None:
    job, model = streamed(tmp_path)
    twin = ResNet().double().eval()
    twin.load_state_dict({**twin.state_dict(), **{n: w.clone() for n, w in job.weights()}})
    loss, count = job.evaluate(images(1))
    assert (loss, count) == (pytest.approx(float(twin(*images(1)).detach()), rel=1e-12), 1)
    with pytest.raises(OutsizeError, match=r"weights rest on tiers.*job\.evaluate"):
        model(*images(1))
    with pytest.raises(OutsizeError, match=r"state_dict would give others.*job\.state_dict"):
        model.state_dict()
    job.close()
    model.state_dict()
    rested = [p for p in model.parameters() if p.isnan().all()]
    assert rested, "what had rested below must not look like a weight"
    model(*images(1))
    with pytest.raises(OutsizeError, match="job is closed"):
        job.step(images(1))


def test_memory_is_let_go_as_it_moves(tmp_path, monkeypatch) -> None:
    """Of the model's own parameters only one chunk at a time is there twice."""
    torch.manual_seed(1)
    model = ResNet().double().eval()
    whole = states(model) // 4
    ledger = Ledger()
    for p in model.parameters():
        ledger.see(p)
    assert ledger.total == whole
    monkeypatch.setattr("outsize.train.prepared.making.meter", lambda *_: ledger)
    job = prepare(
        model, optimizer_of(model), memory=int(0.45 * states(model)), disk=f"{tmp_path}:1GiB"
    )
    job._job = job._make(images(0))
    assert job.forecast is not None
    assert ledger.live["workspace"] == 0, "the model's own memory is still held"
    assert ledger.peak <= whole + sum(job.forecast.static.values())
    job.close()


def test_a_tier_without_a_budget_and_too_small_ones_are_refused(tmp_path) -> None:
    model = ResNet(3).double().eval()
    with pytest.raises(OutsizeError, match=r"'disk' is a tier .* pass memory='2GiB'"):
        prepare(model, "adamw", disk=str(tmp_path))
    job = prepare(model, "adamw", memory=states(model) // 2, disk=f"{tmp_path}:64KiB")
    with pytest.raises(OutsizeError, match=r"tiers below the device are too small .* missing"):
        job.step(images(0))
    job = prepare(model, "adamw", memory=states(model) // 50, disk=f"{tmp_path}:1GiB")
    with pytest.raises(OutsizeError, match=r"bytes missing; the smallest plan needs"):
        job.step(images(0))
    assert list(tmp_path.iterdir()) == []


def test_the_least_that_is_named_runs_where_a_pool_takes_more_than_it_spares(tmp_path):
    """Blocks of 6 x 6 in pieces of a file take three times what they do on the device; a loss that
    the caller keeps is the caller's."""

    def stepped(memory):
        layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        model = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 2)).double()
        job = prepare(
            model, "sgd", memory, disk=f"{tmp_path}:1GiB", loss=lambda y, batch: y.square().mean(),
            blocks=[f"{i}" for i in range(1, 4)],
        )  # fmt: skip
        kept = [job.step(torch.ones(5, 4, dtype=torch.float64)) for _ in range(3)]
        assert kept[0] > kept[2]

    with pytest.raises(OutsizeError, match="is too small") as refusal:
        stepped(2000)
    least = int(re.search(r"\((\d+) bytes\) with nothing below", str(refusal.value))[1])
    stepped(least)
    with pytest.raises(OutsizeError, match="1 byte missing"):
        stepped(least - 1)
