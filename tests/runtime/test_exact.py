"""Steps give the plain loop's numbers: 1e-10 in float64 over 20 steps, whose learning rates differ.

Every way of running a step: tests/verify/test_matrix.py.
"""

from __future__ import annotations

import dataclasses

import plain
import pytest
import torch

from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import AdamW, LearningRate
from outsize.plan import Plan, Precision, Stage
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Recipe

FLOAT64 = Precision.named("float64")
STEPS, ROWS, SEQUENCE, VOCAB = 20, 3, 24, 61


def config(**changes):
    base = {
        "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "vocab_size": VOCAB,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip
    return parse({**base, **changes})


def plan_of(**changes) -> Plan:
    base = Plan(5, per_segment(5), ROWS, 1, SEQUENCE, FLOAT64)
    return dataclasses.replace(base, **changes)


PLANS = {
    "plain": plan_of(microbatch_rows=3),
    "uneven-microbatches": plan_of(microbatch_rows=2),
    "loss-chunk": plan_of(loss_chunk=7),
    "everything": plan_of(
        mlp_tile=5,
        loss_chunk=7,
        split_backward=True,
        microbatch_rows=2,
        stages=(Stage(0, 1), Stage(1, 2, ("attention",)), Stage(2, 4, ("block",)), Stage(4, 5)),
    ),
}


@pytest.fixture(scope="module")
def data():
    return plain.batches(STEPS, ROWS, SEQUENCE, VOCAB)


@pytest.fixture(scope="module")
def rates():
    schedule = LearningRate("cosine", STEPS, warmup=4)
    return [1e-2 * schedule.factor(i) for i in range(STEPS)]


@pytest.fixture(scope="module")
def reference(data, rates):
    model = build(config(), seed=1, dtype=torch.float64)
    return plain.train(model, data, rates, clip=0.5, decay=0.1)


def job_of(plan: Plan, **changes) -> Job:
    model = build(config(**changes), seed=1, dtype=torch.float64)
    return Job(NativeFlow(model, plan), plan, Recipe(AdamW(weight_decay=0.1), 0.5))


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("name", ["uneven-microbatches", "everything"])
def test_losses_norms_and_weights_equal_the_plain_loop(name, data, rates, reference):
    losses, norms, model = reference
    assert any(norm > 0.5 for norm in norms), "the test must clip"
    job = job_of(PLANS[name])
    for step, (batch, lr) in enumerate(zip(data, rates, strict=True)):
        loss = float(job.step(batch, lr))
        assert abs(loss - losses[step]) <= 1e-10 * abs(losses[step])
        assert abs(job.report.norm - norms[step]) <= 1e-10 * norms[step]
    got = dict(job.weights())
    for parameter, expected in model.named_parameters():
        assert worst(got[parameter], expected.detach()) <= 1e-10, parameter


def test_bitwise_equal_run_to_run(data, rates):
    runs = []
    for _ in range(2):
        job = job_of(PLANS["everything"])
        losses = [job.step(b, lr) for b, lr in zip(data[:4], rates[:4], strict=True)]
        runs.append([*losses, *(w.clone() for _, w in job.weights())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_evaluation_equals_the_plain_loss(data):
    job = job_of(PLANS["loss-chunk"])
    total, count = job.evaluate(data[0], ROWS)
    assert count == data[0].count()
    expected = float(plain.loss_of(job.flow.model, data[0]).detach())
    assert abs(total / count - expected) <= 1e-12 * expected


def test_a_step_without_targets_is_refused_and_leaves_the_weights(data):
    job = job_of(PLANS["plain"])
    before = {n: w.clone() for n, w in job.weights()}
    empty = dataclasses.replace(data[0], targets_BS=torch.full_like(data[0].ids_BS, -100))
    with pytest.raises(ValueError, match="no valid target"):
        job.step(empty)
    assert all(torch.equal(before[n], w) for n, w in job.weights())


def test_a_gradient_that_is_not_finite_leaves_the_weights(data):
    job = job_of(PLANS["plain"])
    job.step(data[0], 1e-2)
    before = {n: w.clone() for n, w in job.weights() if "norm" not in n}
    with torch.no_grad():
        dict(job.weights())["epilogue.norm.weight"].fill_(float("nan"))
    with pytest.raises(ValueError, match="gradient norm is nan"):
        job.step(data[1], 1e-2)
    assert all(torch.equal(before[n], w) for n, w in job.weights() if n in before)
