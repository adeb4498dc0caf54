"""Workers of a data axis whose shares of optimizer states make unequal parts below the device: what
they do together stands in the same order for all, and the numbers are those of one worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from piped import numbers
from plain import batches
from streamed import memory, plan_of, resting, small
from subjects import SEQUENCE, VOCAB, config_of
from threads import play

from outsize.collectives import Lone, Mesh
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.optim.parse import parse
from outsize.plan import Plan, Precision, Sharding, Stream, zero
from outsize.plan import plan as plans
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Lane
from outsize.search import PlanRequest
from outsize.search.request import facts_of_model

STEPS = 2


@pytest.mark.parametrize(
    ("stage", "parts", "resident", "order", "together"),
    [(2, 1, 3, "microbatch", 2), (3, 1, 2, "layer", 1), (3, 2, 3, "layer", 2)],
)
def test_workers_meet_in_the_same_order(stage, parts, resident, order, together, monkeypatch):
    """Shares of odd numbers of elements, in parts of just what the smallest share is, or half of
    it: others have one part more."""
    config, data, segments = config_of("gpt2", n_embd=51, vocab_size=997), 4, 5
    request = PlanRequest(4 * data, 8, Precision.named("float32"), AdamW(), mesh=Mesh(data))
    facts = facts_of_model(config, request)
    numel = next(t.numel for t in facts.tables if t.segment == 1)
    assert numel % data
    monkeypatch.setattr(plans, "PART", numel // data // parts)
    plan = Plan(
        segments, per_segment(segments), 4 * data, 2, 8, request.precision, order=order,
        update="behind", mesh=request.mesh, shards=zero(stage, data),
        stream=Stream(resident, part=plans.PART, parts=together),
    )  # fmt: skip
    plan = resting(plan, optimizer="disk")
    every = [facts.placement(plan).elsewhere(i, 0) for i in range(data)]
    said = [[a for a in e.schedule.workers[0] if a.lane is Lane.NETWORK] for e in every]
    assert said[0] and all(one == said[0] for one in said)
    assert len({e.pool for e in every}) == 1


def worker(plan: Plan, optimizer, data):
    def run(world=None):
        model = build(config_of("llama, untied", num_hidden_layers=3), 1, torch.float64)
        with memory() as stores:
            here = Here(world or Lone(), stores=stores)
            job = Job(NativeFlow(model, plan), plan, Recipe(optimizer, 0.5), here)
            found = numbers(job, plan, data)
            parts = [p for some in job.placement.items.pieces.values() for p in some]
            job.close()
        return found, sum(p.first == p.last for p in parts)

    return run


@pytest.mark.parametrize(("name", "stage"), [("muon", 1), ("adamw", 2), ("muon", 3)])
def test_some_workers_have_fewer_parts(name, stage, monkeypatch):
    """Muon's shares are whole matrices: not as many on each worker."""
    small(monkeypatch, 64)
    optimizer = parse(name, 1e-2, 0.1, (0.9, 0.95))
    workers = 3
    plan = plan_of(
        "float64", rows=workers + 1, microbatch_rows=1, mesh=Mesh(workers),
        shards=zero(stage, workers), stream=Stream(part=512, parts=2),
    )  # fmt: skip
    data = batches(STEPS, plan.rows, SEQUENCE, VOCAB)
    alone = replace(plan, mesh=Mesh(), shards=Sharding())
    wanted, _ = worker(alone, optimizer, data)()
    every = play(plan.mesh, worker(resting(plan, optimizer="disk"), optimizer, data))
    assert any(empty for _, empty in every) == (name == "muon")
    for found, _ in every:
        for here, there in zip(found[0], wanted[0], strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        for mine, theirs in zip(found[1:], wanted[1:], strict=True):
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-10, atol=1e-10)
