"""Frozen parameters and experts that no token chooses: the plain loop's numbers, float64."""

from __future__ import annotations

import itertools

import plain
import pytest
import torch
from subjects import PLANS, ROWS, SEQUENCE, VOCAB, base_plan, config_of

from outsize.errors import OutsizeError
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe

STEPS, CLIP = 4, 0.01
RATES = [1e-2 / (i + 1) for i in range(STEPS)]
FROZEN = {
    "prologue": ("prologue",),
    "first blocks": ("prologue", "blocks.0", "blocks.1"),
    "a block in the middle": ("blocks.1",),
    "all but the head": ("prologue", "blocks", "epilogue.norm"),
    "the head": ("epilogue.head",),
    "all matrices": ("matrices",),
}


@pytest.fixture(scope="module")
def data():
    return plain.batches(STEPS, ROWS, SEQUENCE, VOCAB)


def built(name: str, frozen: tuple[str, ...] = (), **changes):
    model = build(config_of(name, **changes), seed=1, dtype=torch.float64)
    for key, parameter in model.named_parameters():
        if key.startswith(frozen or "none") or (frozen == ("matrices",) and parameter.ndim > 1):
            parameter.requires_grad_(False)
    return model


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative; a key's bias has no gradient but noise, as softmax does not see it: it stays 0."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-4))


def check(model, plan: Plan, data, reference) -> None:
    """Train under the plan and compare with what the plain loop gave."""
    losses, norms, expected = reference
    assert any(norm > CLIP for norm in norms), "the test must clip"
    job = Job(NativeFlow(model, plan), plan, Recipe(AdamW(weight_decay=0.1), CLIP))
    for step, (batch, lr) in enumerate(zip(data, RATES, strict=True)):
        assert abs(float(job.step(batch, lr)) - losses[step]) <= 1e-10 * losses[step]
        assert abs(job.report.norm - norms[step]) <= 1e-10 * norms[step]
    got = dict(job.weights())
    assert set(got) == {name for name, _ in expected.named_parameters()}
    for name, parameter in expected.named_parameters():
        assert far(got[name], parameter.detach()) <= 1e-10, name


@pytest.fixture(scope="module")
def experts(data):
    """Mixtral's plain training; in its second layer expert 4 is never chosen."""
    model = unused()
    reference = plain.train(model, data, RATES, clip=CLIP, decay=0.1)
    copy = reference[2]
    copy.zero_grad()
    for batch in data:
        plain.loss_of(copy, batch).backward()
    gradient = copy.blocks[1].mlp.experts.gate.grad
    used = [bool(g.any()) for g in gradient]
    assert not used[4] and sum(used) >= 4, "the test needs an expert without tokens"
    return reference


def unused():
    """A mixtral whose second router never chooses expert 4: of each of two pairs of opposite
    scores one is above its zero. The router is frozen, or training would change that."""
    model = built("mixtral", ("blocks.1.mlp.router",))
    with torch.no_grad():
        score_ED = model.blocks[1].mlp.router.score.weight
        score_ED[0], score_ED[1], score_ED[4] = -score_ED[2], -score_ED[3], 0.0
    return model


@pytest.mark.parametrize("name", ["accumulate", "everything"])
def test_experts_without_tokens(name, data, experts):
    check(unused(), base_plan(**PLANS[name]), data, experts)


@pytest.mark.parametrize(
    ("name", "plan"), [*zip(FROZEN, itertools.cycle(["everything", "one-stage"]), strict=False)]
)
def test_frozen_parameters(name, plan, data):
    model = built("llama, untied", FROZEN[name])
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert before
    reference = plain.train(model, data, RATES, clip=CLIP, decay=0.1)
    check(model, base_plan(**PLANS[plan]), data, reference)
    assert all(torch.equal(dict(model.named_parameters())[n], w) for n, w in before.items())


def test_frozen_parts_need_no_backward_pass_and_no_states(data):
    plan = base_plan(**PLANS["recompute-block"])
    job = Job(NativeFlow(built("llama", ("prologue", "blocks.0")), plan), plan, Recipe(AdamW()))
    stages = {(a.kind, a.stage) for a in job.schedule.workers[0]}
    assert {s for k, s in stages if k != "FORWARD" and s >= 0} == {2, 3, 4}
    trained = {name.rpartition(".")[0] for name, _ in job.optimizer_state()}
    assert trained == {n for n, p in job.owners.items() if p.requires_grad}


def test_nothing_to_train_is_refused():
    model = built("llama", ("prologue", "blocks", "epilogue"))
    plan = base_plan()
    with pytest.raises(OutsizeError, match="no parameter requires a gradient; nothing to train"):
        Job(NativeFlow(model, plan), plan, Recipe(AdamW()))


def test_a_part_that_no_block_has_is_refused():
    plan = base_plan(stages=per_segment(5, ("mpl",)))
    with pytest.raises(OutsizeError, match=r"recompute holds 'mpl', .*did you mean 'mlp'"):
        Job(NativeFlow(built("llama"), plan), plan, Recipe(AdamW()))
