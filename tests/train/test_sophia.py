"""Sophia against a plain loop: labels drawn from whole logits, autograd, the paper's rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import anywhere
import pytest
import torch
from anywhere import WAYS, Given, data_of, plan_of
from plain import loss_of
from threads import play

from outsize.collectives import Mesh
from outsize.errors import OutsizeError
from outsize.models.random import uniform
from outsize.plan.spread import pipelined
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe
from outsize.runtime.special.curvature import NOTES
from outsize.techniques.optim.sophia import NAME, Settings, Sophia
from outsize.train.metrics import read_metrics
from outsize.train.resolve import resolve
from outsize.train.setup import set_up
from outsize.train.show import predicted, time_of

CLIP, RATE, DECAY, GAP, SEED = 0.5, 1e-2, 0.1, 2, 7
OWN = Settings((0.9, 0.8), 0.3, GAP)
GIVEN = Given(Sophia(weight_decay=DECAY, settings=OWN), (NAME,))
RECIPE = Recipe(GIVEN.optimizer, CLIP, seed=SEED)


def drawn(model, batch, step):
    """The batch with labels that the model draws."""
    context = model.context(batch.positions().reshape(-1), batch.flat_bounds())
    with torch.no_grad():
        logits = model.epilogue.logits(model.hidden(batch.ids_BS.reshape(-1), context))
    tokens = batch.ids_BS.numel()
    numbers = torch.from_numpy(uniform(SEED, f"curvature.{step}", 0, tokens))[:, None]
    labels = torch.searchsorted(logits.softmax(-1).cumsum(-1), numbers, right=True)
    labels = labels.view_as(batch.targets_BS)
    return replace(batch, targets_BS=torch.where(batch.targets_BS < 0, -100, labels))


@cache
def by_hand():
    """Weights and states after all steps."""
    model = anywhere.streamed.model_of(GIVEN.family, "float64")
    named = dict(model.named_parameters())
    mean, curvature = ({n: torch.zeros_like(p) for n, p in named.items()} for _ in range(2))
    (one, two), gamma = OWN.betas, OWN.gamma
    moved = []
    for step, batch in enumerate(data_of()):
        if step % GAP == 0:
            labelled = drawn(model, batch, step)
            assert not torch.equal(labelled.targets_BS, batch.targets_BS)
            count = int((batch.targets_BS >= 0).sum())
            grads = torch.autograd.grad(loss_of(model, labelled), list(named.values()))
            for name, g in zip(named, grads, strict=True):
                curvature[name] = two * curvature[name] + (1 - two) * count * g**2
        model.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), CLIP)
        for name, p in named.items():
            mean[name] = one * mean[name] + (1 - one) * p.grad
            towards = mean[name] / (gamma * curvature[name]).clamp(min=1e-12)
            moved.append(float((towards.abs() < 1).double().mean()))
            p.data -= RATE * (DECAY * (p.ndim > 1) * p.data + towards.clamp(-1, 1))
    assert 0.05 < sum(moved) / len(moved) < 0.95, "some steps are clipped, and some are not"
    states = {f"{n}.exp_avg": x for n, x in mean.items()}
    return {n: p.detach() for n, p in named.items()}, states | {
        f"{n}.hessian": x for n, x in curvature.items()
    }


def run(plan, data, resumed=None):
    """Weights, states and counts of every worker."""
    return play(plan.mesh, anywhere.run_of(GIVEN, plan, data, resumed, RECIPE))


@pytest.mark.parametrize("way", ["alone", *(w for w in WAYS if "rows of tables" not in w)])
def test_a_job_is_a_plain_loop_with_drawn_labels(way, monkeypatch):
    anywhere.small(monkeypatch)
    plan = plan_of(GIVEN) if way == "alone" else WAYS[way](GIVEN)
    for found in run(plan, data_of()):
        for mine, theirs in zip(found[:2], by_hand(), strict=True):
            assert mine.keys() == theirs.keys()
            for name, x in theirs.items():
                torch.testing.assert_close(mine[name], x, rtol=1e-10, atol=1e-10, msg=name)
        assert set(found[2].values()) == {anywhere.STEPS}, "estimates are no updates"


def test_it_goes_on_bitwise_between_two_estimates(monkeypatch):
    """With what a checkpoint keeps: weights, states, counts and notes."""
    anywhere.small(monkeypatch)

    def steps(data, resumed=None):
        model = anywhere.streamed.model_of(GIVEN.family, "float64")
        plan = plan_of(GIVEN)
        job = Job(NativeFlow(model, plan), plan, RECIPE)
        if resumed is not None:
            weights, states, notes = resumed
            job.method.recall(notes)
            job.load(lambda n, out: out.copy_(weights[n]), lambda n, out: out.copy_(states[n]))
        for batch in data:
            job.step(batch, RATE)
        found = *anywhere.streamed.snapshot(job), job.method.notes()
        job.close()
        return found

    data = data_of()
    whole, rest = steps(data), steps(data[1:], steps(data[:1]))
    assert rest[2] == whole[2] == {NOTES: {"steps": anywhere.STEPS}}
    for mine, theirs in zip(rest[:2], whole[:2], strict=True):
        assert all(torch.equal(mine[name], x) for name, x in theirs.items())


def test_a_run_holds_what_is_foretold_and_goes_on(runs):
    said = {"optimizer__name": NAME, "plan__approximate": f"[{NAME}]", "sophia__gap": 3}
    runs.train(**said, train__steps=4, sample__tokens=0)
    last = read_metrics(runs.home / "run")[-1]
    more = last["predicted_peak_bytes"] - last["measured_peak_bytes"]
    assert 0 <= more < 1.1 * 4 * 256 * 264, (
        "foretold is an estimate's, with one copy of logits more"
    )
    assert "step 5/5" in runs.resume(runs.home / "run", "train.steps=5")


def test_what_does_not_go_with_it(monkeypatch):
    anywhere.small(monkeypatch)
    tiny = ("model=tiny", "train.steps=1", f"optimizer.name={NAME}", "train.sequence=16")
    named = (*tiny, f"plan.approximate=[{NAME}]", "train.batch_tokens=64")
    with pytest.raises(OutsizeError, match="the optimizer sophia changes the maths: name sophia"):
        set_up(resolve(None, tiny))
    with pytest.raises(OutsizeError, match="its losses are scaled, and squares of gradients"):
        set_up(resolve(None, (*named, "precision=float16")))
    with pytest.raises(OutsizeError, match="ends that a pipeline's workers share: labels"):
        plan_of(GIVEN, mesh=Mesh(pipeline=2), pipeline=pipelined("1f1b+vocabulary:1"))
    with pytest.raises(OutsizeError, match="sophia and zeroth-order both change"):
        set_up(resolve(None, (*named[:-2], f"plan.approximate=[{NAME},zeroth-order]")))


def test_a_plan_says_what_its_estimates_take(monkeypatch):
    """A step is played once more in one of four: as many actions again as a fourth of a step."""
    said = ("model.name=tiny", "train.steps=1", "train.sequence=16", "train.batch_tokens=64")
    named = (*said, f"optimizer.name={NAME}", f"plan.approximate=[{NAME}]", f"{NAME}.gap=4")
    made = set_up(resolve(None, named)).forecast
    assert made.mean == pytest.approx(made.seconds * 5 / 4)
    line = predicted(made)
    more = time_of(made.seconds / 4)
    assert f"on average {more} more for a pass with drawn labels before the first of every" in line
    assert f"({64 / made.mean:,.0f} tokens/s)" in line
    plainly = set_up(resolve(None, said)).forecast
    assert plainly.mean == plainly.seconds and "on average" not in predicted(plainly)
