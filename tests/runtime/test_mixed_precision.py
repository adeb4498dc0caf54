"""bfloat16 with float32 gradients and master copy, against a loop that is written out by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import plain
import pytest
import torch
from engines import intercept
from subjects import PLANS, ROWS, SEQUENCE, VOCAB, base_plan, config_of
from torch.nn import functional as F

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.optim import SGD, AdamW, Muon
from outsize.plan import Precision
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.schedule import Kind

STEPS, RATE = 6, 0.3


@pytest.fixture(scope="module")
def data():
    return plain.batches(STEPS, ROWS, SEQUENCE, VOCAB)


def loss_of(model, batch) -> torch.Tensor:
    """Mean loss in float32 from bfloat16 logits."""
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
    logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
    return F.cross_entropy(logits.float(), batch.targets_BS.reshape(-1), ignore_index=-100)


def by_hand(model, data, sums: torch.dtype):
    """Gradient descent with momentum: forward and backward in bfloat16, a row at a time, gradients
    summed in `sums`, the update on a float32 copy that is rounded into the model."""
    master = [p.detach().clone() for p in model.parameters()]
    moments = [torch.zeros_like(m) for m in master]
    model = copy.deepcopy(model).bfloat16()
    losses = []
    for batch in data:
        total = [torch.zeros(m.shape, dtype=sums) for m in master]
        loss = 0.0
        for row in range(ROWS):
            part = batch.rows(row, row + 1)
            if not part.count():
                continue
            share = part.count() / batch.count()
            mean = loss_of(model, part)
            gradients = torch.autograd.grad(mean * share, list(model.parameters()))
            loss += float(mean.detach()) * share
            for buffer, gradient in zip(total, gradients, strict=True):
                buffer += gradient
        losses.append(loss)
        with torch.no_grad():
            for p, m, v, g in zip(model.parameters(), master, moments, total, strict=True):
                v.mul_(0.9).add_(g.float())
                m.sub_(v, alpha=RATE)
                p.copy_(m)
    return losses, dict(zip((n for n, _ in model.named_parameters()), master, strict=True))


def away(got, start, expected) -> float:
    """Relative distance of what training has changed, over all weights."""
    square = lambda tensors: sum(float(t.double().square().sum()) for t in tensors)  # noqa: E731
    apart = square(got[n] - expected[n] for n in expected)
    return (apart / square(expected[n] - start[n] for n in expected)) ** 0.5


@pytest.mark.parametrize("plan", ["accumulate", "everything"])
def test_training_follows_the_loop_by_hand(plan, data):
    """Not bitwise: the order of operations differs (tiles, chunks, in-place gradients), and each of
    the tens of operators that a gradient goes through rounds it to 8 bits, by 2^-9 of itself. What
    training changes may differ by about a percent; a wrong or lost gradient differs by all."""
    model = build(config_of("llama"), seed=1)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses, expected = by_hand(model, data, torch.float32)
    chosen = base_plan("bfloat16", **PLANS[plan])
    job = Job(NativeFlow(model, chosen), chosen, Recipe(SGD(RATE, 0.9)))
    got = [float(job.step(batch)) for batch in data]
    assert got == pytest.approx(losses, rel=2e-3)
    assert away(dict(job.weights()), start, expected) < 0.02


def test_what_is_held_has_the_dtypes_of_the_plan(data):
    plan = base_plan("bfloat16")
    job = Job(NativeFlow(build(config_of("llama"), seed=1), plan), plan, Recipe(AdamW()))
    job.step(data[0])
    assert all(p.dtype == torch.bfloat16 for p in job.flow.model.parameters())
    assert all(w.dtype == torch.float32 for _, w in job.weights())
    assert all(s.dtype == torch.float32 for _, s in job.optimizer_state())
    for chunk in job.chunks:
        assert chunk.gradients.dtype == torch.float32
        assert torch.equal(chunk.parameters, chunk.master.bfloat16()), "bitwise the rounded master"


def test_the_update_is_bitwise_that_of_torch_on_the_master(data):
    """From the job's own gradients, float32 AdamW by PyTorch gives the same bits."""
    plan = base_plan("bfloat16", **PLANS["everything"])
    job = Job(
        NativeFlow(build(config_of("llama"), seed=1), plan), plan, Recipe(AdamW(weight_decay=0.2))
    )
    twins = {n: torch.nn.Parameter(w.clone()) for n, w in job.weights()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in twins.values() if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for p in twins.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip

    def norm(action, plainly) -> None:
        for chunk in job.chunks:
            for slot in chunk.table.slots:
                twins[slot.name].grad = slot.of(chunk.gradients).clone()
        plainly()

    intercept(job, Kind.NORM, norm)
    for batch in data:
        job.step(batch, 1e-2)
        optimizer.step()
        assert all(torch.equal(w, twins[n]) for n, w in job.weights())


def test_small_updates_survive_in_the_master_alone(data):
    """At this rate no update reaches half of bfloat16's last digit; fifteen of them together do."""
    kept = {}
    for master in ("float32", None):
        precision = Precision("bfloat16", master, "float32", "float32")
        approximate = () if master else ("bfloat16-weights",)
        plan = base_plan(precision=precision, approximate=approximate, microbatch_rows=3)
        model = build(config_of("llama"), seed=1)
        job = Job(NativeFlow(model, plan), plan, Recipe(AdamW(weight_decay=0.0)))
        before = model.blocks[0].mlp.up.weight.detach().clone()
        for _ in range(15):
            job.step(data[0], 8e-6)
        now = model.blocks[0].mlp.up.weight.detach()
        large = before.abs() > 2**-6  # half of the last digit is 2^-14, seven times a step
        kept[master] = float((now != before)[large].float().mean())
    assert kept["float32"] > 0.5 and kept[None] < 0.1


def test_bfloat16_without_master_is_refused_unless_it_is_named():
    with pytest.raises(OutsizeError, match="without a master copy"):
        base_plan(precision=Precision("bfloat16", None))


def test_moments_in_bfloat16_are_asked_for_and_do_not_stand_still():
    plan = base_plan(precision=Precision("float32", None, "float32", "bfloat16"))
    with pytest.raises(OutsizeError, match="rounds every moment"):
        Job(NativeFlow(build(config_of("llama")), plan), plan, Recipe(AdamW()))
    named = replace(plan, approximate=("bfloat16-weights",))
    for optimizer in (AdamW(betas=(0.9, 0.999)), Muon(rest=AdamW(betas=(0.9, 0.999)))):
        with pytest.raises(OutsizeError, match=r"betas\[1\] is 0.999 .* stand still"):
            Job(NativeFlow(build(config_of("llama")), named), named, Recipe(optimizer))
    Job(
        NativeFlow(build(config_of("llama")), named), named, Recipe(AdamW(betas=(0.9, 0.996)))
    ).close()


def test_a_router_correction_is_not_rounded():
    model = build(config_of("deepseek_v3"), seed=1)
    correction = model.blocks[1].mlp.router.correction
    with torch.no_grad():
        correction.copy_(torch.linspace(0.001, 1.2345, 8))
    before = correction.detach().clone()
    plan = base_plan("bfloat16")
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW()))
    job.step(plain.batches(1, ROWS, SEQUENCE, VOCAB)[0])
    name = "blocks.1.mlp.router.correction"
    assert torch.equal(dict(model.named_parameters())[name], before)
    assert torch.equal(dict(job.weights())[name], before)
