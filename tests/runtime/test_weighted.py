"""Jobs whose targets have weights, and whose loss is another: the plain loop's numbers, 1e-10 in
float64, on every kind of mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import piped
import plain
import pytest
import torch
from clipped import Clipped, plainly
from streamed import plan_of
from subjects import SEQUENCE, VOCAB
from threads import play
from torch.nn import functional as F

from outsize.collectives import Mesh, parse_mesh
from outsize.data import Batch
from outsize.errors import OutsizeError
from outsize.models.decoder import Decoder
from outsize.optim import AdamW
from outsize.parallel.divide import divide
from outsize.parallel.execution import execution_of
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe

SEGMENTS = 5
RATE, CLIP, DECAY = 1e-2, 0.5, 0.1


def model(family: str) -> Decoder:
    return piped.model(family, segments=SEGMENTS)


def line(**changes: Any) -> Plan:
    return piped.piped("1f1b", 2, 3, segments=SEGMENTS, **changes)


def flat(mesh: Mesh, **changes) -> Plan:
    """Microbatches of two rows, the last of one row."""
    stages = changes.pop("stages", per_segment(SEGMENTS))
    return plan_of(
        "float64", segments=SEGMENTS, rows=5 * mesh.data, microbatch_rows=2, mesh=mesh,
        stages=stages, **changes,
    )  # fmt: skip


PLANS = {
    "alone": flat(Mesh()),
    "chunks": flat(
        Mesh(), loss_chunk=7, sequence_chunk=8, stages=per_segment(SEGMENTS, ("block",))
    ),
    "data": flat(Mesh(data=2)),
    "tensor": flat(Mesh(tensor=2)),
    "context": flat(parse_mesh("context=2")),
    "pipeline": line(),
    "vocabulary-1": line(pipeline=Pipelined("1f1b", vocabulary=1)),
    "vocabulary-2": line(pipeline=Pipelined("1f1b", vocabulary=2)),
}


def weighed(plan: Plan) -> list[Batch]:
    """Weights of all sizes, a quarter of them 0: by row as well, so that workers have not alike."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for batch in plain.batches(1, plan.rows, SEQUENCE, VOCAB):
        shape = batch.targets_BS.shape
        weights = 3 * torch.rand(shape, generator=generator)
        weights *= torch.arange(1, shape[0] + 1).unsqueeze(1) / shape[0]
        weights[torch.rand(shape, generator=generator) < 0.25] = 0.0
        made.append(replace(batch, weights_BS=weights))
    return made


def trained(plan: Plan, data: list[Batch], loss=None):
    """Losses, norms, counts, an evaluation and weights, of every worker."""

    def run(world):
        mine = model("llama")
        cuts = divide(mine, world, plan)
        optimizer = AdamW(weight_decay=DECAY)
        job = Job(
            NativeFlow(mine, plan, execution=replace(execution_of(plan.mesh, world), loss=loss)),
            plan,
            Recipe(optimizer, CLIP),
            Here(world),
            cuts=cuts,
        )
        steps = []
        for batch in data:
            made = job.step(batch.rows(*plan.rows_at(job.place)), RATE)
            steps.append((float(made), job.report.norm, job.report.count))
        mine = data[0].rows(*plan.rows_at(job.place))
        evaluated = job.evaluate(mine, mine.ids_BS.shape[0])
        weights = {name: value.clone() for name, value in job.weights()}
        job.close()
        return steps, evaluated, weights

    return play(plan.mesh, run)


@pytest.mark.parametrize("name", PLANS)
def test_weights_by_target(name):
    plan = PLANS[name]
    data = weighed(plan)
    losses, norms, twin = plain.train(model("llama"), data, [RATE] * len(data), CLIP, DECAY)
    with torch.no_grad():
        held = float(plain.loss_of(twin, data[0]))
    whole = dict(twin.named_parameters())
    for steps, evaluated, weights in trained(plan, data):
        assert [loss for loss, *_ in steps] == pytest.approx(losses, rel=1e-10)
        assert [norm for _, norm, _ in steps] == pytest.approx(norms, rel=1e-10)
        for (*_, count), batch in zip(steps, data, strict=True):
            assert count == int(((batch.targets_BS != -100) & (batch.weights_BS != 0)).sum())
        total, weight = evaluated
        assert total / weight == pytest.approx(held, rel=1e-10)
        for key, value in weights.items():
            torch.testing.assert_close(value, whole[key].detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", PLANS)
def test_another_loss(name):
    """Coefficients by target, and the log-probabilities of two other models."""
    plan = PLANS[name]
    data, twin = weighed(plan), model("llama")
    (batch,) = data
    context = twin.context(batch.positions().reshape(-1), batch.flat_bounds())

    def log_probabilities():
        logits = twin.epilogue.logits(twin.hidden(batch.ids_BS.reshape(-1), context))
        targets = batch.targets_BS.reshape(-1)
        return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")

    shape = batch.targets_BS.shape
    with torch.no_grad():
        near = log_probabilities().view(shape)
    columns = {
        "advantage": torch.randn(shape, dtype=torch.float64),
        "old": near + 0.3 * torch.randn(shape, dtype=torch.float64),
        "reference": near + torch.randn(shape, dtype=torch.float64),
    }
    data = [replace(batch, columns=columns)]
    laid = {key: value.reshape(-1) for key, value in columns.items()}
    weights = (batch.weights_BS * (batch.targets_BS != -100)).reshape(-1)
    loss = (plainly(log_probabilities(), laid) * weights).sum() / weights.double().sum()
    loss.backward()
    parameters = list(twin.parameters())
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, float("inf")))
    for steps, *_ in trained(plan, data, Clipped()):
        ((made, measured, _),) = steps
        assert made == pytest.approx(float(loss.detach()), rel=1e-10)
        assert measured == pytest.approx(norm, rel=1e-10)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "batch: no valid target in the whole step"),
        (-1.0, "batch: the weight of a target is -1.0; expected a finite number, 0 or more"),
        (float("nan"), "batch: the weight of a target is nan"),
        (float("inf"), "batch: the weight of a target is inf"),
    ],
)
def test_weights_that_are_none(value, said):
    plan = PLANS["alone"]
    (batch,) = plain.batches(1, plan.rows, SEQUENCE, VOCAB)
    batch = replace(batch, weights_BS=torch.full(batch.targets_BS.shape, value))
    job = Job(NativeFlow(model("llama"), plan), plan, Recipe(AdamW()))
    with pytest.raises(OutsizeError, match=said):
        job.step(batch)


def test_a_batch_is_cut_in_one_place():
    (batch,) = weighed(PLANS["alone"])
    batch = replace(batch, columns={"old": torch.randn(batch.targets_BS.shape)})
    part = batch.rows(1, 3).to("cpu")
    assert torch.equal(part.weights_BS, batch.weights_BS[1:3])
    assert torch.equal(part.columns["old"], batch.columns["old"][1:3])
    assert part.weight() == pytest.approx(
        float((part.weights_BS * (part.targets_BS != -100)).double().sum())
    )
