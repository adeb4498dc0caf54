"""What people bring to `prepare`: classifiers without a wrapper, modules without blocks, decoders
of transformers with their caches on, and mistakes that must not train in silence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outsize
from outsize import OutsizeError

LR = 1e-2


class Linears(nn.Module):
    """A list of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Shared(nn.Module):
    """One block with one weight, called thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())] * 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Twice(nn.Module):
    """Its blocks are called in two rounds, and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        for _ in range(2):
            for block in self.blocks:
                x = self.dropout(block(x))
        return x


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))


def cross_entropy(output, given):
    return F.cross_entropy(output, given[1])


def summed(output, given):
    return F.cross_entropy(output, given[1], reduction="sum")


def plain(model: nn.Module, given, steps: int) -> dict[str, torch.Tensor]:
    """The weights after PyTorch's own loop."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(given[0]), given[1]).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("make", [classifier, Linears, Shared, Twice, lambda: nn.Linear(4, 4)])
@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_a_pair_trains_any_module_as_pytorch_does(make, memory) -> None:
    model, given = make().double(), batch()
    with torch.random.fork_rng():
        want = plain(model, given, 3)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    job = outsize.prepare(model, optimizer, memory, loss=cross_entropy)
    for _ in range(3):
        job.step(given)
    for name, value in job.weights():
        assert torch.allclose(value, want[name], rtol=0, atol=1e-12), name


def test_a_pair_that_the_forward_takes_is_passed_whole() -> None:
    model = nn.Bilinear(4, 4, 2).double()
    x, _ = given = (torch.randn(3, 4).double(), torch.randn(3, 4).double())
    want = model(*given).square().sum().item()
    job = outsize.prepare(model, "sgd", loss=lambda out, _: out.square().sum())
    assert float(job.step(given)) == pytest.approx(want, rel=1e-12) and len(x) == 3


def test_blocks_come_in_the_order_that_is_said() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Sequential(nn.Linear(4, 4))
            self.first = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            return self.last(self.first(x)).square().mean()

    x = torch.randn(3, 4)
    job = outsize.prepare(Backwards(), "sgd", blocks=["first", "last"])
    job.step(x)
    assert job.plan.segments == 4
    other = outsize.prepare(Backwards(), "sgd", blocks=["last", "first"])
    with pytest.raises(OutsizeError, match="'first'"):
        other.step(x)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("mean", [True, False])
def test_a_mean_beside_count_is_refused(rows, mean) -> None:
    """With 16 microbatches it would learn 16 times too slowly."""
    x, y = torch.randn(rows * 4, 4).double(), torch.randint(0, 4, (rows * 4,))
    reduction = "mean" if mean else "sum"
    job = outsize.prepare(
        classifier().double(), "sgd", microbatches=4, count=lambda given: len(given[1]),
        loss=lambda out, given: F.cross_entropy(out, given[1], reduction=reduction),
    )  # fmt: skip
    if mean:
        with pytest.raises(OutsizeError, match=r"loss gives a mean.*reduction=\"sum\""):
            job.step((x, y))
    else:
        job.step((x, y))


def test_a_mean_over_some_targets_is_refused_too() -> None:
    y = torch.tensor([1, -100, -100, -100, 2, 3])
    job = outsize.prepare(
        classifier(), "sgd", microbatches=2, loss=cross_entropy,
        count=lambda given: int((given[1] != -100).sum()),
    )  # fmt: skip
    with pytest.raises(OutsizeError, match="loss gives a mean"):
        job.step((torch.randn(6, 4), y))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clip": -1.0}, "clip is -1.0; expected the largest norm"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"microbatches": 0}, "microbatches is 0; expected a whole number from 1 on"),
        ({"microbatches": True}, "microbatches is True"),
        ({"clip": "1"}, "clip is 1; expected the largest norm"),
        ({"loss": 3}, r"loss is 3; expected a function, \(output, batch\)"),
        ({"count": 4}, "count is 4; expected a function, batch -> number of targets"),
        ({"blocks": 3}, "blocks is 3; expected names, as 'encoder"),
        ({"recompute": True}, r"recompute is True; expected names, as \('block',\)"),
        ({"mesh": 2}, "mesh is 2; expected workers by axis, as 'data=2,tensor=2'"),
        ({"optimizer": torch.optim.AdamW}, "optimizer is <class .*AdamW'>; expected one of torch"),
        ({"optimizer": None}, "optimizer is None; expected one of torch.optim made over"),
        ({"model": nn.Identity()}, "Identity has no parameters; nothing to train"),
    ],
)
def test_arguments_that_cannot_be_are_refused(values, said) -> None:
    usual = {"model": classifier(), "optimizer": "sgd", "loss": summed, "count": len}
    with pytest.raises(OutsizeError, match=said):
        outsize.prepare(**{**usual, **values})


def test_a_name_stands_for_a_list_of_it_and_a_dtype_for_its_name() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    job = outsize.prepare(
        model, "sgd", loss=lambda out, b: out.sum(), recompute="block", precision=torch.float32
    )
    job.step(torch.ones(2, 4))
    assert job.plan.stages[1].recompute == ("block",)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda out, b: None, "loss is a NoneType; expected a scalar tensor of floats"),
        (lambda out, b: (out.sum(), 1), "loss is a tuple; expected a scalar tensor"),
        (lambda out, b: {"loss": out.sum()}, "loss is a dict; expected"),
        (lambda out, b: out, r"loss is a tensor of torch.float32 of shape \(2, 4\); expected"),
        (lambda out, b: out.sum().long(), r"loss is a tensor of torch.int64 of shape \(\)"),
        (lambda out, b: out.sum().detach(), "loss depends on no parameter that is trained"),
    ],
)
def test_a_loss_that_is_none_is_refused(made, said) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    job = outsize.prepare(model, "adamw", loss=made)
    with pytest.raises(OutsizeError, match=said):
        job.step((torch.ones(2, 4), torch.ones(2)))


def test_caches_of_transformers_are_off_until_close() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 97, (4, 32))
    given = {"input_ids": ids, "labels": ids}
    want = float(model(**given).loss.detach())
    job = outsize.prepare(model, "adamw", "1200KiB")
    assert float(job.step(given)) == pytest.approx(want, rel=1e-5)
    assert any(stage.recompute for stage in job.plan.stages), "the budget is tight"
    assert job.forecast is not None and job.forecast.peak <= 1200 * 1024
    assert not model.config.use_cache
    job.close()
    assert model.config.use_cache


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_scheduler_of_momentum_is_followed(kind) -> None:
    """OneCycleLR changes betas or momentum with every step, unless it is told not to."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    twin = copy.deepcopy(model)

    def optimizer_of(m):
        if kind == "sgd":
            optimizer = torch.optim.SGD(m.parameters(), 0.01, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(m.parameters(), 0.01)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    data = [torch.randn(5, 4, dtype=torch.float64) for _ in range(5)]
    optimizer, schedule = optimizer_of(twin)
    for x in data:
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        optimizer.step()
        schedule.step()
    optimizer, schedule = optimizer_of(model)
    job = outsize.prepare(model, optimizer, loss=lambda out, batch: out.square().mean())
    for x in data:
        job.step(x)
        schedule.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    if kind == "sgd":
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(OutsizeError, match="momentum has become 0"):
            job.step(data[0])
