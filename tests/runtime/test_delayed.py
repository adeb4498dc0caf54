"""Delayed updates against the plain loop: AdamW on the gradients of the step before."""

from __future__ import annotations

import copy
from dataclasses import replace

import plain
import pytest
import torch
from subjects import ROWS, VOCAB, base_plan, config_of
from torch import nn

from outsize.collectives.mesh import Mesh
from outsize.errors import OutsizeError
from outsize.memory.store import MemoryStore
from outsize.models.build import build
from outsize.optim import SGD, AdamW, Muon
from outsize.plan import Precision, Rest, Stream
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job, NativeFlow
from outsize.runtime.delayed import Delayed

STEPS, WARMUP, CLIP = 7, 2, 0.4
LRS = [1e-2, 8e-3, 9e-3, 1e-2, 7e-3, 6e-3, 5e-3]
PRECISION = Precision("float64", "float64", "float64", "float64")
HOST = Rest("device", "host", "host")


@pytest.fixture(scope="module")
def data():
    return plain.batches(STEPS, ROWS, 20, VOCAB)


def plan_of(rest=HOST, **changes):
    stages = tuple(replace(stage, rest=rest) for stage in per_segment(5))
    kept = {"approximate": ("delayed-update",), "stages": stages, "precision": PRECISION,
            "stream": Stream(part=1 << 20, host=1 << 30)}  # fmt: skip
    return base_plan(**{**kept, **changes})


def delayed(plan, family="llama", optimizer=None, warmup=WARMUP, model=None):
    model = model or build(config_of(family), seed=1, dtype=torch.float64)
    optimizer = optimizer or AdamW(weight_decay=0.1)
    stores = {"host": MemoryStore("host", 1 << 22)}
    return Delayed(NativeFlow(model, plan), plan, optimizer, stores, warmup, CLIP)


def by_hand(model, batches, optimizer_of, warmup, loss_of=plain.loss_of):
    """The plain loop: a parameter without a gradient is left alone, as torch.optim does."""
    model = copy.deepcopy(model)
    named = list(model.parameters())
    groups = [
        {"params": [p for p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer, losses, waiting = optimizer_of(groups), [], None
    for step, (batch, lr) in enumerate(zip(batches, LRS, strict=False)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(named, CLIP)
        fresh = [None if p.grad is None else p.grad.clone() for p in named]
        if step >= warmup:
            for p, late in zip(named, waiting or [None] * len(named), strict=True):
                p.grad = late
            waiting = fresh
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def adamw(groups):
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def sgd(groups):
    plain_groups = [{**group, "weight_decay": 0.0} for group in groups]
    return torch.optim.SGD(plain_groups, lr=1.0, momentum=0.8)


@pytest.mark.parametrize(
    ("family", "ours", "theirs", "warmup", "changes"),
    [
        ("llama", AdamW(weight_decay=0.1), adamw, WARMUP, {}),
        ("gpt2", AdamW(weight_decay=0.1), adamw, 0, {"order": "layer"}),
        ("mixtral", AdamW(weight_decay=0.1), adamw, 1, {"microbatch_rows": ROWS}),
        ("llama, untied", SGD(momentum=0.8, weight_decay=0.0), sgd, WARMUP, {}),
    ],
)
def test_steps_equal_the_plain_loop(family, ours, theirs, warmup, changes, data):
    model = build(config_of(family), seed=1, dtype=torch.float64)
    losses, expected = by_hand(model, data, theirs, warmup)
    late = delayed(plan_of(**changes), family, ours, warmup)
    got = [float(late.step(batch, lr)) for batch, lr in zip(data, LRS, strict=True)]
    assert got == pytest.approx(losses, rel=1e-10)
    at_once, _ = by_hand(model, data, theirs, STEPS)
    assert max(abs(a - b) for a, b in zip(got, at_once, strict=True)) > 1e-4
    weights = dict(late.job.weights())
    for name, parameter in expected.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-9, atol=1e-11), name


class Side(nn.Module):
    """A block with a part that only some steps use."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, used):
        return x + self.main(x).tanh() + (self.side(x) if used else 0)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Side() for _ in range(3))

    def forward(self, x, y, used):
        for block in self.blocks:
            x = block(x, used)
        return nn.functional.mse_loss(x, y)


def test_a_gradient_is_applied_once_and_no_gradient_is_none():
    torch.manual_seed(0)
    model = Sometimes().double()
    uses = (True, True, False, True, False, False, True)
    batches = [(torch.randn(5, 6).double(), torch.randn(5, 6).double(), u) for u in uses]
    losses, expected = by_hand(model, batches, adamw, 1, lambda m, batch: m(*batch))
    plan = plan_of(rows=1)
    mine = copy.deepcopy(model)
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(mine.blocks)]
    flow = AdoptedFlow(mine, blocks, plan, lambda out, _: out)
    stores = {"host": MemoryStore("host", 1 << 20)}
    late = Delayed(flow, plan, AdamW(weight_decay=0.1), stores, 1, CLIP)
    got = [float(late.step(batch, lr)) for batch, lr in zip(batches, LRS, strict=True)]
    assert got == pytest.approx(losses, rel=1e-10)
    weights = dict(late.job.weights())
    for name, parameter in expected.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-9, atol=1e-11), name


def test_it_goes_on_bitwise_from_saved_weights_states_and_counts(data):
    pairs = list(zip(data, LRS, strict=True))
    whole, first, other = (delayed(plan_of()) for _ in range(3))
    expected = [float(whole.step(*pair)) for pair in pairs]
    losses = [float(first.step(*pair)) for pair in pairs[:4]]
    weights = {n: w.clone() for n, w in first.job.weights()}
    states = {n: s.clone() for n, s in first.job.optimizer_state()}
    other.load(
        lambda name, out: out.copy_(weights[name]), lambda name, out: out.copy_(states[name]),
        first.job.update_counts(),
    )  # fmt: skip
    assert losses + [float(other.step(*pair)) for pair in pairs[4:]] == expected
    both = zip(whole.job.weights(), other.job.weights(), strict=True)
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in both)


def test_the_update_runs_beside_the_computation(data, monkeypatch):
    late, seen = delayed(plan_of(), warmup=0), []
    late.step(data[0], 1e-2)
    inner, forward = type(late)._piece, Job._forward

    def piece(self, *args):
        seen.append("update")
        inner(self, *args)

    def slow(self, action):
        while "update" not in seen:  # ends only if the thread runs at the same time
            pass
        forward(self, action)

    monkeypatch.setattr(Delayed, "_piece", piece)
    monkeypatch.setitem(late.job._steps, late.job.schedule.workers[0][0].kind,
                        lambda action: slow(late.job, action))  # fmt: skip
    late.step(data[1], 1e-2)
    assert seen


def test_a_fault_of_the_thread_is_raised_and_the_job_torn(data, monkeypatch):
    late = delayed(plan_of(), warmup=0)
    late.step(data[0], 1e-2)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Delayed, "_piece", lambda *_: 1 / 0)
        late.step(data[1], 1e-2)
    with pytest.raises(OutsizeError, match=r"cut off .* load a checkpoint"):
        late.step(data[1], 1e-2)


def test_what_is_refused():
    from outsize.train.resolve import resolve
    from outsize.train.setup import set_up

    model = build(config_of("llama"), seed=1)
    with pytest.raises(OutsizeError, match="name delayed-update there"):
        delayed(base_plan())
    with pytest.raises(OutsizeError, match="this job updates at once"):
        Job(NativeFlow(model, plan_of()), plan_of(), AdamW())
    with pytest.raises(OutsizeError, match="warmup is -1"):
        delayed(plan_of(), warmup=-1)
    with pytest.raises(OutsizeError, match="updates whole matrices"):
        delayed(plan_of(), optimizer=Muon())
    with pytest.raises(OutsizeError, match="rest on 'device'; expected a tier of memory"):
        delayed(plan_of(rest=Rest()))
    for changes, what in (
        ({"precision": Precision.named("float64")}, "no master copy"),
        ({"stream": Stream()}, "stream.host 0"),
        ({"update": "behind"}, "update: behind"),
        ({"approximate": ("delayed-update", "frozen-by-dynamics"), "rest": Rest()}, "frozen-by-d"),
    ):
        with pytest.raises(OutsizeError, match=f"the plan has {what}.* do not go together"):
            plan_of(**changes)
    for name in ("zeroth-order", "frozen-by-dynamics", "local-learning", "delayed-update"):
        several = {"approximate": (name,), "rest": Rest(), "mesh": Mesh(3)}
        with pytest.raises(OutsizeError, match=f"holds {name}, which runs on one worker"):
            plan_of(**several)
    with pytest.raises(OutsizeError, match="for which `outsize train` places no states"):
        set_up(resolve(None, ("plan.approximate=[delayed-update]", "model=tiny")))
