"""Adopted modules on a pipeline, workers as threads: the numbers of plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from between import WIDTH, Chain, EncoderDecoder, Pairs, Skips, cross_entropy, made, tokens
from threads import play

from outsize.collectives import Mesh
from outsize.memory import Ledger
from outsize.models.adopt import find_blocks
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job
from outsize.runtime.adopted.flow import reach_of
from outsize.runtime.recipe import Here, Recipe
from outsize.train.prepared.batches import cut

ROWS, STEPS = 7, 1  # four microbatches of two rows, the last one of one
MODELS = {
    "chain": (Chain, 4), "tied": (Chain, 4, True), "pairs": (Pairs,), "skips": (Skips,),
    "encoder-decoder": (EncoderDecoder,),
}  # fmt: skip


def count(ids):
    return torch.tensor(float(ids[:, 1:].numel()), dtype=torch.float64)


def plain(model, data):
    model = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch), batch) / count(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append((float(loss.detach()), float(norm)))
    with torch.no_grad():
        losses.append(float(cross_entropy(model(data[0]), data[0])))
    return losses, dict(model.named_parameters())


def plan_of(model, mesh, schedule, recompute=(), **changes):
    segments = len(find_blocks(model)) + 2
    return Plan(
        segments, per_segment(segments, recompute), ROWS * mesh.data, 2, 0,
        Precision.named("float64"), mesh=mesh, pipeline=Pipelined(schedule), **changes,
    )  # fmt: skip


def check(model, plan):
    """Workers with their rows beside plain PyTorch with all rows; gives what each one holds."""
    data = [ids for seed in range(STEPS) for ids in tokens(plan.rows, seed)[:1]]
    wanted, parameters = plain(model, data)
    models = [copy.deepcopy(model) for _ in range(plan.mesh.size)]

    def run(world):
        mine = models[world.rank]
        blocks = find_blocks(mine)
        reach = reach_of(mine, blocks, cross_entropy, data[0][:2])
        flow = AdoptedFlow(mine, blocks, plan, cross_entropy, cut, count, reach)
        job = Job(flow, plan, Recipe(AdamW(weight_decay=0.1), 0.5), Here(world))
        rows = plan.rows_at(job.place)
        found = []
        for ids in data:
            loss = job.step(ids[slice(*rows)], 1e-2)
            found.append((float(loss), job.report.norm))
        found.append(job.evaluate(data[0][slice(*rows)], rows[1] - rows[0])[0])
        weights = {name: w.clone() for name, w in job.weights()}
        held = {slot.name for chunk in job.chunks for slot in chunk.table.slots}
        job.close()
        return found, weights, held

    every = play(plan.mesh, run)
    for found, weights, _ in every:
        for here, there in zip(found, wanted, strict=True):
            assert here == pytest.approx(there, rel=1e-10)
        assert weights.keys() == parameters.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-10)
    return [held for _, _, held in every]


# What both workers hold (tied) in order, both ways, and there and back; skips where gradients come
# apart, too.
WAYS = {
    "chain": ("zb-h1",), "tied": ("1f1b", "chimera", "dualpipe-v"), "pairs": ("gpipe",),
    "skips": ("zb-h1", "dualpipe-v"), "encoder-decoder": ("chimera",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schedule"), [(name, way) for name, ways in WAYS.items() for way in ways]
)
def test_two_workers(name, schedule):
    kind, *more = MODELS[name]
    model = made(kind, *more)
    check(model, plan_of(model, Mesh(pipeline=2), schedule))


def test_each_block_lets_its_input_go_in_its_backward():
    """Of blocks that are computed again only the inputs are kept: one less after each."""
    model = made(Chain)
    plan = replace(plan_of(model, Mesh(), "1f1b", ("block",)), rows=2)
    flow = AdoptedFlow(model, find_blocks(model), plan, cross_entropy)
    job = Job(flow, plan, Recipe(AdamW()), Here(ledger=Ledger()))
    job.step(tokens(2)[0])
    events = [event for event in job.report.trace.events if event.kind == "BACKWARD"]
    job.close()
    held = [event.live["device/activations"] for event in events]
    hidden = 2 * 7 * WIDTH * 8  # bytes: rows, tokens, features, of a float64
    falls = [before - after for before, after in pairwise(held[1:-2])]
    assert falls == [hidden] * 3, "of the blocks between the last and the first"
