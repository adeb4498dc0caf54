"""Modules that `prepare` refuses, or takes as a plain loop does: parameters without values or of
one memory, wrappers, what sees a part of the rows, what a forward changes besides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import outsize
from outsize import OutsizeError
from outsize.collectives import Mesh
from outsize.collectives.threads import play


class Net(nn.Module):
    def __init__(self, block=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), first=None):
        super().__init__()
        self.first = first or nn.Identity()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


CHANGED = r"'blocks\.0\..*' is changed by the forward, once a microbatch"


class Averaging(nn.Module):
    """Keeps the mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Counting(nn.Module):
    """Warms up by the calls that it has had."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (0.1 * self.calls)


class Tallying(nn.Module):
    """Counts its rows, in a buffer and in Python."""

    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(6, 6), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        self.rows += len(x)
        return self.linear(x)


def made(*args, **more):
    torch.manual_seed(0)
    return Net(*args, **more).double()


def total(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum")


def rows(batch):
    return len(batch[1])


def batches(ids=False):
    g = torch.Generator().manual_seed(1)
    inputs = [torch.randint(0, 9, (4,), generator=g) if ids else
              torch.randn(4, 6, generator=g).double() for _ in range(3)]  # fmt: skip
    return [(x, torch.arange(4) % 3) for x in inputs]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def same_as_plain(make, given, optimizer=adamw, **options):
    model, twin = make(), make()
    want, have = optimizer(twin), optimizer(model)
    job = outsize.prepare(model, have, loss=total, count=rows, **options)
    for batch in given:
        want.zero_grad()
        loss = total(twin(batch[0]), batch) / rows(batch)
        loss.backward()
        want.step()
        assert float(job.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-10)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    job.close()
    return model


def shared():
    model = made()
    model.head.bias = nn.Parameter(model.blocks[0][0].bias.data[3:])
    return model


def kept():
    model = made()
    model.register_buffer("best", model.head.weight.data)
    return model


def wrapped():
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = made()
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: nn.Sequential(nn.LazyLinear(4)),
            "parameter '0.weight' has no shape yet; call the",
        ),
        (lambda: made().to("meta"), r"'blocks.0.0.weight' is on the meta device.*to_empty"),
        (shared, "parameter 'blocks.0.0.bias' and parameter 'head.bias' are two tensors of one"),
        (kept, "(parameter 'head.weight'|buffer 'best') and .* are two tensors of one memory"),
        (wrapped, "is a DistributedDataParallel, .*; pass model.module"),
    ],
)
def test_parameters_that_a_job_cannot_have_are_refused(make, said):
    with pytest.raises(OutsizeError, match=said):
        outsize.prepare(make(), "sgd", loss=total)


def test_views_of_one_memory_that_do_not_overlap_are_taken():
    model, flat = made(), torch.zeros(6).double()
    model.head.bias = nn.Parameter(flat[:3])
    model.register_buffer("scale", flat[3:])
    outsize.prepare(model, "sgd", loss=total)


def hooked():
    model = made()
    model.head.bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def test_hooks_of_gradients_see_whole_batches():
    same_as_plain(hooked, batches())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (hooked, "'head.bias' has a hook of its gradient.*microbatches is 2"),
        (lambda: made(first=nn.Embedding(9, 6, max_norm=1.0)), "'first' has max_norm"),
    ],
)
def test_what_would_see_a_part_of_the_rows_is_refused(make, said):
    with pytest.raises(OutsizeError, match=said):
        outsize.prepare(make(), "sgd", loss=total, count=rows, microbatches=2)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (lambda model: model.head.bias.register_hook(torch.clone), "'head.bias' has a hook of its"),
        (
            lambda model: model.blocks[1].register_full_backward_hook(lambda *_: None),
            r"module 'blocks\.1' has a backward hook, and a pipeline",
        ),
        (None, "batch: x of a Pair is a tensor that is not seen there"),
    ],
)
def test_what_the_first_batch_shows_is_refused_on_all_workers(late, said, near):
    models = [made() for _ in range(2)]

    def work(world):
        model = models[world.rank]
        job = outsize.prepare(
            model, "sgd", loss=total, count=rows, mesh="pipeline=2", microbatches=2
        )
        batch = Pair(*batches()[0]) if late is None else batches()[0]
        if late is not None:
            late(model)
        with pytest.raises(OutsizeError, match=said):
            job.step(batch)

    play(Mesh(pipeline=2), near(work))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Averaging, pytest.warns(UserWarning, match=CHANGED)),
        (Counting, pytest.raises(OutsizeError, match=CHANGED)),
        (lambda: spectral_norm(nn.Linear(6, 6)), pytest.warns(UserWarning, match=CHANGED)),
    ],
)
def test_what_each_microbatch_would_change_is_said(block, said):
    """Refused where it is wrong for certain: a buffer may have a place for each row."""
    job = outsize.prepare(made(block), "sgd", loss=total, count=rows, microbatches=2)
    with said:
        for batch in batches():
            job.step(batch)
    same_as_plain(partial(made, block), batches())


def test_what_grows_by_rows_is_whole_in_microbatches():
    model = made(Tallying)
    job = outsize.prepare(model, "sgd", loss=total, count=rows, microbatches=2)
    for batch in batches():
        job.step(batch)
    assert [(int(block.seen), block.rows) for block in model.blocks] == [(12, 12)] * 2


def test_so_is_what_each_worker_would_change_by_its_own_rows(near):
    kinds = {Averaging: "mean", Tallying: "seen", Counting: None}
    models = {block: [made(block) for _ in range(2)] for block in kinds}

    def work(world):
        for block, own in models.items():
            job = outsize.prepare(
                own[world.rank], "sgd", loss=total, count=rows, mesh="data=2", zero=0
            )
            x, y = batches()[0]
            mine = slice(2 * world.rank, 2 * world.rank + 2)
            if block is Counting:
                job.step((x[mine], y[mine]))
                continue
            said = rf"'blocks\.0\.{kinds[block]}' is changed by the forward, by"
            with pytest.raises(OutsizeError, match=said):
                job.step((x[mine], y[mine]))

    play(Mesh(data=2), near(work))


def test_a_block_that_counts_its_calls_is_computed_again_as_it_was():
    same_as_plain(partial(made, Counting), batches(), recompute=("block",))


@pytest.mark.parametrize("options", [{}, {"memory": "1MiB"}])
def test_sparse_gradients_are_summed_as_others(options):
    def make():
        torch.manual_seed(1)
        return made(first=nn.Embedding(9, 6, sparse=True))

    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    assert same_as_plain(make, batches(ids=True), sgd, **options).first.sparse


class Compiled(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


@pytest.mark.parametrize("wrap", [nn.DataParallel, Compiled])
def test_a_pair_is_told_apart_behind_a_wrapper(wrap):
    model = wrap(made())
    job = outsize.prepare(model, adamw(model), loss=total, count=rows)
    batch = batches()[0]
    want = float(total(model(batch[0]), batch).detach()) / 4
    assert float(job.step(batch)) == pytest.approx(want, rel=1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_taken_whole_alone():
    batch = batches()[0]
    script = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double())
    outsize.prepare(script, "sgd", loss=total).step(batch)
    with pytest.raises(OutsizeError, match=r"torch\.jit\.script has made, which cannot be predi"):
        outsize.prepare(script, "sgd", "1MiB", loss=total)


def test_a_schedule_that_is_none_is_refused_on_one_worker_too():
    with pytest.raises(OutsizeError, match="schedule 'zb-h7': unknown; did you mean 'zb-h"):
        outsize.prepare(made(), "sgd", loss=total, pipeline="zb-h7")
    outsize.prepare(made(), "sgd", loss=total, pipeline="interleaved:2")
