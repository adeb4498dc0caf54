"""Scaled losses: the numbers of a plain loop with torch.amp.GradScaler; a step that overflows on
one worker is left out on all."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from random import Random

import pytest
import torch
from plain import batches, loss_of
from streamed import ALL, PIECE, disk, memory, model_of, resting, small, snapshot
from subjects import PLANS, SEQUENCE, VOCAB, base_plan, config_of
from threads import play
from tiered import LARGER, MACHINE, WISH, chosen
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.collectives import Lone, Mesh
from outsize.errors import OutsizeError
from outsize.optim import AdamW
from outsize.plan import Plan, Precision, Stream, zero
from outsize.runtime.loss_scale import INTERVAL, NOTES, LossScale, recalled
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search import choose

STEPS, RATE, CLIP = 3, 1e-2, 0.5
PLANTED = 1  # the step, counted from 0, of which a gradient overflows
WHERE = "epilogue.norm.weight"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


class Plant:
    """Has the gradient of a parameter overflow where `now` is set."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.now = False
        dict(model.named_parameters())[name].register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * inf if self.now else gradient


def scaler_over(weights, factor: float = 2.0**16):
    """PyTorch's own scaler, and its optimizer of `weights`."""
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": 0.1},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, RATE, (0.9, 0.95), foreach=False)
    return torch.amp.GradScaler("cpu", init_scale=factor), optimizer


def norm_of(weights) -> float:
    return float(nn.utils.clip_grad_norm_(weights, CLIP, foreach=False))


def plain_loop(data):
    """By GradScaler, in float64: losses, norms, weights, first moments, the factor, updates."""
    model = copy.deepcopy(model_of("llama, untied", "float64"))
    plant, weights = Plant(model, WHERE), list(model.parameters())
    scaler, optimizer = scaler_over(weights)
    losses, norms = [], []
    for step, batch in enumerate(data):
        plant.now = step == PLANTED
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(norm_of(weights))
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    named = {n: p.detach() for n, p in model.named_parameters()}
    means = {f"{n}.exp_avg": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    steps = {int(optimizer.state[p]["step"]) for p in weights}
    return losses, norms, named, means, scaler.get_scale(), steps


def planted(plan: Plan, stores=memory):
    """What a worker does: steps in float64 whose losses are scaled all the same, one of which
    overflows on the last worker."""

    def run(world):
        model = model_of("llama, untied", "float64")
        plant = Plant(model, WHERE)
        with stores() as tiers:
            recipe, here = Recipe(AdamW(weight_decay=0.1), CLIP), Here(world, stores=tiers)
            job = make_job(NativeModel(model), plan, recipe, here)
            job.method.norm.scaling = LossScale()
            losses, norms = [], []
            for step, batch in enumerate(batches(STEPS, plan.rows, SEQUENCE, VOCAB)):
                plant.now = step == PLANTED and world.rank == world.mesh.size - 1
                before = snapshot(job)
                losses.append(float(job.step(batch.rows(*plan.rows_at(job.place)), RATE)))
                norms.append(job.report.norm)
                if step == PLANTED:
                    assert all(map(same, before, snapshot(job)))
            found = losses, norms, *snapshot(job), job.report.scaling, dict(job.update_counts())
            job.close()
        return found

    return run


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


CUT = {"rows": 4, "microbatch_rows": 1, "mesh": Mesh(2)}
LAYERS, LOWER = {"order": "layer"}, {"gradients": "host", "optimizer": "host"}
CASES = {  # what the plan has, and where its states rest
    "everything": (PLANS["everything"], {}),
    "zero 2": ({**CUT, "shards": zero(2, 2)}, {}),
    "zero 3, optimizer on host": ({**CUT, "shards": zero(3, 2)}, {"optimizer": "host"}),
    "pipeline": ({"rows": 4, "mesh": Mesh(pipeline=2)}, {}),
    "all on disk": (LAYERS, ALL),
    "updated on host": (LAYERS, LOWER),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_overflows_is_left_out_as_grad_scaler_does(name: str, tmp_path) -> None:
    changes, rest = CASES[name]
    if name == "updated on host":
        changes = {**changes, "stream": Stream(part=4 * PIECE, host=2)}
    plan = resting(base_plan(**changes), **rest)
    work = planted(plan, partial(disk, tmp_path) if name == "all on disk" else memory)
    every = [work(Lone())] if plan.mesh.size == 1 else play(plan.mesh, work)
    data = batches(STEPS, plan.rows, SEQUENCE, VOCAB)
    losses, norms, weights, means, factor, steps = plain_loop(data)
    assert not isfinite(norms[PLANTED])
    norms[PLANTED] = inf
    for mine in every:
        assert mine[0] == pytest.approx(losses, rel=1e-10)
        assert mine[1] == pytest.approx(norms, rel=1e-10)
        for n, w in mine[2].items():
            torch.testing.assert_close(w, weights[n], rtol=1e-10, atol=1e-10)
        for n in means.keys() & mine[3].keys():
            torch.testing.assert_close(mine[3][n], means[n], rtol=1e-10, atol=1e-10)
        assert mine[4] == LossScale(factor, STEPS - 1 - PLANTED, 1)
        assert set(mine[5].values()) == steps == {STEPS - 1}
    assert {n for mine in every for n in mine[2]} == weights.keys()


def test_the_factor_is_that_of_grad_scaler() -> None:
    """Over two growths and overflows between them, to the notes of a checkpoint and back."""
    weight = nn.Parameter(torch.zeros(1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], 0.0)
    mine, draw = LossScale(), Random(0)
    for step in range(2 * INTERVAL + 100):
        grows = step < 50 or step == INTERVAL - 1
        overflows = grows and draw.random() < 0.2
        weight.grad = torch.full((1,), inf if overflows else 1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        mine = mine.after(inf if overflows else 1.0)
        assert mine.factor == scaler.get_scale()
    assert mine.skipped > 3 and mine.factor > 2.0**16 * 0.5**mine.skipped


class Tower(nn.Module):
    """A classifier of blocks, as somebody brings it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.leave = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def cross_entropy(output, given):
    return F.cross_entropy(output.float(), given[1])


def in_float16(model, data):
    """The usual loop: a model in float16, masters in float32, GradScaler."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    scaler, optimizer = scaler_over(masters)
    losses, factors = [], []
    for batch in data:
        model.zero_grad()
        loss = cross_entropy(model(batch[0]), batch)
        scaler.scale(loss).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        scaler.unscale_(optimizer)
        norm_of(masters)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(float(loss.detach()))
        factors.append(scaler.get_scale())
    return losses, factors, masters


def test_prepare_trains_a_float16_model_as_grad_scaler_does(tmp_path) -> None:
    """Large inputs overflow until the factor is small enough. What is saved in between goes on with
    the same bits."""
    torch.manual_seed(0)
    model = Tower().half()
    data = [(40 * torch.randn(8, 6).half(), torch.randint(0, 5, (8,))) for _ in range(8)]
    losses, factors, masters = in_float16(copy.deepcopy(model), data)
    assert factors[0] < 2.0**16 and factors[-1] == factors[-2], "overflows, and then none"

    def prepared():
        own = copy.deepcopy(model)
        groups = [{"params": [p for p in own.parameters() if p.ndim > 1], "weight_decay": 0.1}]
        groups += [{"params": [p for p in own.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, RATE, (0.9, 0.95))
        return outsize.prepare(own, optimizer, loss=cross_entropy, clip=CLIP)

    job, found = prepared(), []
    for step, batch in enumerate(data):
        found.append(float(job.step(batch)))
        assert job.report.scaling.factor == factors[step]
        if step == 4:
            job.save(tmp_path / "saved")
            state = job.state_dict()
    # Updates that differ in float32's last digit may round to another float16: by 2^-11 of it.
    assert found == pytest.approx(losses, rel=2**-10)
    mine = dict(job.weights())
    for (name, _), theirs in zip(model.named_parameters(), masters, strict=True):
        torch.testing.assert_close(mine[name], theirs.detach(), rtol=2**-10, atol=3e-4)
    for way in ("files", "dictionary"):
        again = prepared()
        again.load(tmp_path / "saved") if way == "files" else again.load_state_dict(state)
        assert [float(again.step(batch)) for batch in data[5:]] == found[5:]
        assert again.report.scaling == job.report.scaling
        assert same(dict(again.weights()), dict(job.weights()))
    next(again.model.parameters()).requires_grad_(False)  # a job of other parameters goes on so
    again.step(data[5])
    assert again.report.scaling.skipped == job.report.scaling.skipped


def test_an_overflow_without_scaling_ends_the_run() -> None:
    with pytest.raises(OutsizeError, match=r"norm is inf .* loss scale of 1; .* unchanged"):
        LossScale(1.0).after(inf)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update": "behind"}, "update is 'behind' and precision.compute float16"),
        ({"precision": Precision("float16")}, "float16 and precision.master None"),
        ({"approximate": ("zeroth-order",)}, "zeroth-order and the plan has precision float16"),
        ({"approximate": ("local-learning",)}, "local-learning and the plan has precision float16"),
        ({"approximate": ("frozen-by-dynamics",)}, "dynamics and the plan has precision float16"),
    ],
)
def test_where_scaling_cannot_go_it_is_refused(changes, said: str) -> None:
    with pytest.raises(OutsizeError, match=said):
        base_plan(**{"precision": Precision.named("float16"), **changes})


def test_updates_behind_the_backward_pass_are_planned_in_bfloat16_alone() -> None:
    config, updates = config_of("llama", **LARGER), {}
    for name in ("bfloat16", "float16"):
        request = replace(WISH, clip=None, precision=Precision.named(name))
        whole = choose(config, replace(request, tiers=()), MACHINE).peak
        updates[name] = chosen(config, request, whole // 2).plan.update
    assert updates == {"bfloat16": "behind", "float16": "apart"}


def test_a_checkpoint_whose_notes_are_none_is_refused() -> None:
    with pytest.raises(OutsizeError, match=r"loss scale is .*; expected factor, steps and skipped"):
        recalled({NOTES: {"factor": "1"}})
