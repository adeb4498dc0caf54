"""Blocks that do more than return something, and code around them that does more than call them
once: as a plain loop has it, or refused in a line."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outsize.collectives import Mesh
from outsize.collectives.threads import play
from outsize.errors import OutsizeError
from outsize.train.prepare import prepare

RECORDED = contextvars.ContextVar("recorded")


@dataclasses.dataclass
class Made:
    y: torch.Tensor
    spread: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Given:
    x: torch.Tensor


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(16, 16), nn.Linear(16, 3)

    def both(self, x):
        gates = self.gate(x).softmax(-1)
        return x + self.up(x).tanh() * gates[:, :1], gates.var()


class Listed(Gated):
    def forward(self, x, spreads):
        x, spread = self.both(x)
        spreads.append(spread)
        return x


class Stored(Gated):
    def forward(self, x):
        x, self.spread = self.both(x)
        return x


class Opened(Gated):
    def forward(self, given):
        return Made(*self.both(given.x))


class Plain(Gated):
    def forward(self, x):
        return self.both(x)[0]


class Smooth(Gated):
    def forward(self, x):
        return x + self.up(x).tanh()  # PyTorch's slope of a softmax has no gradient


class InPlace(Gated):
    def forward(self, x):
        return self.both(F.relu_(x))[0]


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16)
        self.layers, self.last = nn.ModuleList(block() for _ in range(3)), nn.Linear(16, 2)

    def forward(self, x):
        y, spread = self.through(self.norm(self.first(x)))
        return self.last(y).square().mean() - spread


class ByList(Model):
    def through(self, x):
        spreads = []
        for layer in self.layers:
            x = layer(x, spreads)
        return x, sum(spreads, x.new_zeros(()))


class ByAttribute(Model):
    def through(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, sum(layer.spread for layer in self.layers)


class ByDataclass(Model):
    def through(self, x):
        spread = 0.0
        for layer in self.layers:
            made = layer(Given(x))
            x, spread = made.y, spread + made.spread
        return x, spread


class Recording(Gated):
    def forward(self, x):
        x, spread = self.both(x)
        RECORDED.get().append(spread)
        return x


class ByRecord(Model):
    """As transformers records attention weights."""

    def through(self, x):
        RECORDED.set([])
        for layer in self.layers:
            x = layer(x)
        return x, sum(RECORDED.get())


class Backwards(Model):
    def through(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x, 0.0


class Penalised(Model):
    def through(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, self.layers[1].up.weight.square().sum()


class Forces(Model):
    """What it gives is the gradient of an energy, part of which goes around the blocks."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        y, _ = self.through(self.first(x))
        (force,) = torch.autograd.grad(self.last(y).sum(), x, create_graph=True)
        return force.square().mean()

    def through(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x, 0.0


class Mapped(Model):
    """Its blocks see one row at a time."""

    def through(self, x):
        def row(x):
            for layer in self.layers:
                x = layer(x[None])[0]
            return x

        return torch.func.vmap(row)(x), 0.0


class Sloped(Model):
    """The slope of what its blocks give goes around them, by forward-mode differentiation."""

    def through(self, x):
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, torch.ones_like(x))
            for layer in self.layers:
                y = layer(y)
            y, slope = forward_ad.unpack_dual(y)
        return y + slope, 0.0


class Checkpointed(Model):
    def through(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x, 0.0


def sgd(model):
    return torch.optim.SGD(model.parameters(), torch.tensor(0.01).double(), momentum=0.9)


def same_as_plain(model, **options):
    twin = copy.deepcopy(model)
    optimizer, job = sgd(twin), prepare(model, sgd(model), **options)
    for seed in range(3):
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        want = twin(x)
        want.backward()
        optimizer.step()
        torch.testing.assert_close(job.step(x), want.detach(), rtol=1e-10, atol=0)
    weights = {name: weight.clone() for name, weight in job.weights()}
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-10, atol=1e-13)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, twin.get_buffer(name), rtol=1e-10, atol=1e-13)
    job.close()


def made(kind, block):
    torch.manual_seed(0)
    return kind(block).double()


def streamed(tmp_path, memory=27_500):
    return {"memory": memory, "disk": f"{tmp_path}:1GiB"}


@pytest.mark.parametrize("recompute", [(), ("block",)])
@pytest.mark.parametrize(
    ("kind", "block"), [
        (ByList, Listed), (ByDataclass, Opened), (Backwards, InPlace), (Forces, Plain),
        (Mapped, Plain), (Sloped, Smooth),
    ],
)  # fmt: skip
def test_what_blocks_do_besides_is_seen(kind, block, recompute):
    same_as_plain(made(kind, block), recompute=recompute)


def test_a_dataclass_and_a_rate_that_is_a_tensor_go_with_tiers(tmp_path):
    same_as_plain(made(ByDataclass, Opened), **streamed(tmp_path))


@pytest.mark.parametrize(("kind", "block"), [(ByAttribute, Stored), (ByRecord, Recording)])
def test_what_blocks_leave_elsewhere_is_seen_where_they_are_computed_once(kind, block):
    same_as_plain(made(kind, block), recompute=())


@pytest.mark.parametrize("kind", [collections.UserDict, type("Own", (dict,), {})])
def test_a_mapping_of_a_type_of_its_own_is_a_batch(kind):
    model = made(Backwards, Plain)
    x = torch.ones(4, 4, dtype=torch.float64)
    told = {"loss": lambda out, batch: 4 * out, "count": lambda batch: len(batch["x"])}
    job = prepare(
        model, "adamw", "1MiB", microbatches=2, approximate=["microbatch-statistics"], **told
    )
    job.step(kind(x=x))
    assert job.plan.rows == 4


@pytest.mark.parametrize(
    ("kind", "block", "message"),
    [
        (ByList, Listed, "'layers.0' writes into a list or a dictionary"),
        (Backwards, InPlace, "'layers.2' is called where 'layers.0' was expected"),
        (Penalised, InPlace, "'layers.0' changes a tensor that it receives in place"),
        (ByAttribute, Stored, "leaves a tensor elsewhere than in what it returns"),
        (Penalised, Plain, "reads 'layers.1.up.weight', a parameter of a block"),
        (Checkpointed, Plain, "'layers.2' is called in the backward pass"),
        (Forces, Plain, r"is differentiated where it runs \(torch\.autograd\.grad"),
        (Mapped, Plain, r"'layers.0' is called inside torch\.func"),
        (Sloped, Smooth, r"'layers.0' is called inside torch\.func .* or forward_ad"),
    ],
)
def test_what_nobody_would_see_below_the_device_is_refused(kind, block, message, tmp_path):
    with pytest.raises(OutsizeError, match=message):
        same_as_plain(made(kind, block), **streamed(tmp_path))


def test_an_attribute_of_a_block_that_is_computed_again_is_refused():
    with pytest.raises(OutsizeError, match="leaves a tensor elsewhere than"):
        same_as_plain(made(ByAttribute, Stored), recompute=("block",))


def test_complex_parameters_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(OutsizeError, match=r"parameter 'phase' is of torch\.complex64"):
        prepare(model, "adamw")


def test_a_checkpoint_around_blocks_is_refused_where_gradients_are_summed(near):
    models = [made(Checkpointed, Plain) for _ in range(2)]

    def work(world):
        told = {"loss": lambda out, batch: 5 * out, "count": len}
        job = prepare(models[world.rank].eval(), "sgd", mesh="data=2", zero=0, recompute=(), **told)
        with pytest.raises(OutsizeError, match=r"'layers\.2' is called in the backward pass"):
            job.step(torch.ones(5, 4, dtype=torch.float64))

    play(Mesh(data=2), near(work))
