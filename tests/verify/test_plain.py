"""The plain run itself, against what PyTorch, transformers' way of attention and others say."""

from __future__ import annotations

from dataclasses import replace

import plain as loops
import pytest
import torch
from subjects import CONFIGS, SEQUENCE, VOCAB, config_of
from verifying import case_of, fill

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.kernels.entropy import PLAIN
from outsize.models.build import build
from outsize.optim import SGD, AdamW, Muon
from outsize.plan import Pipelined, Precision
from outsize.plan.approximate import PARTIAL
from outsize.plan.plan import per_segment
from outsize.verify import Adopted, verify
from outsize.verify.bounds import Bounds
from outsize.verify.compare import compare
from outsize.verify.naive import Walk, loss_of, walks_of
from outsize.verify.plain import Recipe, Step, train
from outsize.verify.planned import kept
from outsize.verify.updates import updater


@pytest.mark.parametrize("family", CONFIGS)
def test_naive_attention_and_experts_are_the_models(family):
    """Scores, windows, caps and experts written out, against the model's own kernels."""
    model = build(config_of(family), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    batch = loops.batches(1, 3, SEQUENCE, VOCAB)[0]
    total, count = loss_of(model, batch, PLAIN)
    (total / count).backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = loops.loss_of(model, batch)
    loss.backward()
    assert float(total.detach()) / count == pytest.approx(float(loss.detach()), rel=1e-12)
    largest = max(float(g.abs().max()) for g in mine.values())
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-9, atol=1e-12 * largest)


def test_the_loop_is_that_of_the_other_tests():
    """AdamW with clipping, beside torch's own clip_grad_norm_."""
    case = case_of(optimizer=AdamW(1e-2, weight_decay=0.1), clip=0.5, steps=3)
    found = train(
        case.subject.plain(Precision.named("float64")), case.recipe, list(map(case.batch, range(3)))
    )
    model = case.subject.plain(Precision.named("float64")).model
    data = [case.batch(step) for step in range(3)]
    losses, norms, trained = loops.train(model, data, [1e-2] * 3, 0.5, 0.1)
    assert [step.loss for step in found] == pytest.approx(losses, rel=1e-12)
    assert [step.norm for step in found] == pytest.approx(norms, rel=1e-12)
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(found[-1].weights[name], weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 4, 5)])
def test_muon_is_torchs(shape, scale):
    """In bfloat16, as torch computes it."""
    torch.manual_seed(2)
    stack, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    muon = Muon(1e-2, weight_decay=0.1, scale=scale)
    mine = stack.clone()
    update = updater(muon, {"w": mine}, frozenset({"w"}))
    each = [m.clone() for m in (stack if stack.ndim == 3 else [stack])]
    torchs = torch.optim.Muon(each, lr=1e-2, weight_decay=0.1, adjust_lr_fn=scale)
    for gradient in gradients:
        mine.grad = gradient.clone()
        for matrix, own in zip(each, gradient if gradient.ndim == 3 else [gradient], strict=True):
            matrix.grad = own.clone()
        update(1e-2)
        torchs.step()
    wanted = torch.stack(each).view(shape)
    moved, apart = (mine - stack).abs().mean(), (mine - wanted).abs().mean()
    assert apart < 0.1 * moved and moved > 1e-3


def test_an_optimizer_without_a_twin_is_played_by_its_own_update():
    weight, grown = (torch.ones(2, 2, dtype=torch.float64) for _ in range(2))
    own, theirs = (updater(x, {"w": weight}, frozenset()) for x in (kept(SGD(1e-2)), SGD(1e-2)))
    weight.grad = grown
    own(0.5)
    moved = weight.clone()
    theirs(0.5)
    assert torch.allclose(weight, 2 * moved - 1, rtol=1e-12) and float(moved[0, 0]) == 0.5


def test_a_master_copy_keeps_what_bfloat16_loses():
    case = case_of(optimizer=SGD(1e-6), steps=2)
    found = train(
        case.subject.plain(Precision.named("bfloat16")),
        case.recipe,
        list(map(case.batch, range(2))),
    )
    weights = found[-1].weights["blocks.0.mlp.up.weight"]
    assert weights.dtype == torch.float32
    assert not weights.equal(found[0].weights["blocks.0.mlp.up.weight"])


def step(**changes) -> Step:
    one = torch.ones(2, 2, dtype=torch.float64)
    usual = {"loss": 1.0, "norm": 2.0, "gradients": {"a": one, "b": None}, "weights": {"a": one}}
    return Step(**{**usual, **changes})


def test_differences_are_parts_of_the_plain_values():
    one = torch.ones(2, 2, dtype=torch.float64)
    same = compare([step()], [step()], "float64")
    assert same.worst == 0 and same.holds() and same.rows[0].ratio == 1
    assert not compare([step()], [step()], "float64", differ=[1]).holds()
    twice = compare([step(gradients={"a": 2 * one, "b": None})], [step()], "float64")
    assert twice.rows[0].ratio == 2 and twice.rows[0].gradient == 1
    arrived = compare([step(gradients={"a": one, "b": one})], [step()], "float64")
    assert arrived.gradient > 1 and arrived.rows[1].ratio is None
    lost = compare([step(gradients={"a": None, "b": None})], [step()], "float64")
    assert lost.rows[0].ratio == 0 and lost.gradient == 1
    for bad in (float("nan"), float("inf")):
        assert compare([step(loss=bad)], [step()], "float64").worst == float("inf")
        broken = compare([step(weights={"a": one * bad})], [step()], "float64")
        assert broken.worst == float("inf")


def test_own_precision_is_as_near_to_float64_as_plain_pytorch():
    case = case_of(named="float32", mesh=Mesh(2, 2), rows=5, microbatch_rows=2, clip=0.5)
    found = verify(case)
    assert found.holds and found.own is not None and found.usual is not None
    assert 1e-9 < found.own.gradient < 20 * found.usual.gradient < 1e-2
    assert not found.own.differ


def test_recipe_takes_the_optimizers_rate():
    case = case_of(optimizer=SGD(0.25))
    assert case.recipe.rates == (0.25, 0.25)
    assert replace(case, rate=0.5).recipe == Recipe(SGD(0.25), (0.5, 0.5))


def test_rows_that_leave_segments_out_go_the_plans_ways():
    """SkipPipe, on two data places with uneven rows; over all segments the numbers are others."""
    case = case_of(
        mesh=Mesh(2, 1, 3), pipeline=Pipelined("skip-pipe:0.5", (1, 3)), approximate=(PARTIAL,),
        rows=13, microbatch_rows=2, stages=per_segment(5), clip=0.5,
    )  # fmt: skip
    ways = walks_of(case.plan)
    assert sorted(row for way in ways for row in range(way.start, way.stop)) == list(range(13))
    assert {way.segments for way in ways} == {(0, 1, 2, 4), (0, 3, 4)}
    exact, batches = Precision.named("float64"), [case.batch(step) for step in range(case.steps)]
    assert verify(case, own=False).holds
    whole = train(case.subject.plain(exact), case.recipe, batches)
    left_out = train(case.plain(exact), case.recipe, batches)
    assert compare(left_out, whole, "float64").worst > 1e-3


@pytest.mark.parametrize("wired", [{"kraken_ways": 2}, {"ladder_from": 1}])
def test_stages_that_are_left_out_give_what_they_take(wired):
    """Wired blocks give more than the first ones take: draw 110008 of eight workers."""
    case = case_of(
        changes={**wired, "num_hidden_layers": 4}, mesh=Mesh(pipeline=3), rows=6, segments=6,
        pipeline=Pipelined("skip-pipe:0.5", (1, 3)), approximate=(PARTIAL,), stages=per_segment(6),
        steps=1,
    )  # fmt: skip
    with pytest.raises(OutsizeError, match=r"give 1, \d, 2 times the model's features"):
        verify(case, own=False)
    whole = replace(case.plan.pipeline, cuts=(3, 4))
    assert verify(replace(case, plan=replace(case.plan, pipeline=whole)), own=False).holds


def test_ways_of_adopted_modules_are_their_own():
    own = Adopted(torch.nn.Linear(2, 2), lambda step, rows: None, lambda out, batch: out, len)
    with pytest.raises(OutsizeError, match="Linear is an adopted module, whose own forward calls"):
        own.plain(Precision.named("float64"), [Walk(0, 1, (0,))])


def test_what_differs_anywhere_is_a_difference() -> None:
    """In any step, in one number, in bits between workers; and what is no number holds nowhere."""
    w = torch.ones(3)
    steps = [Step(1.0, 2.0, {"w": w}, {"w": w})] * 2
    odd = torch.tensor([1.0, float("nan"), 1.0])
    assert compare(steps, steps, "float64").worst == 0.0
    assert not compare(steps, steps, "float64", differ=[1]).holds()
    for change in ({"loss": 1.1}, {"norm": 2.1}, {"norm": float("nan")}, {"weights": {"w": odd}},
                   {"gradients": {"w": odd}}, {"gradients": {"w": None}}):  # fmt: skip
        other = replace(steps[0], **change)
        for mine in ([other, steps[0]], [steps[0], other]):
            assert not compare(mine, steps, "float64").holds(), change
    key = ("w", "ratio")
    assert not Bounds({key: 1.0}, 1).over({key: 1.0})
    assert Bounds({key: 1.0}, 1).over({key: float("nan")})
