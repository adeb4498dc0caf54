"""The example of a graph network as a pipeline: both modes beside plain PyTorch."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from threads import play
from torch.nn import functional as F

import outsize
from outsize.collectives import Mesh
from outsize.models.adopt import find_blocks
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import AdoptedFlow, Job
from outsize.runtime.adopted.flow import reach_of
from outsize.train.prepared.batches import cut

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gnnpipe as example

from outsize.runtime.recipe import Here, Recipe

LAYERS, CHUNKS, STEPS, RATE = 4, 5, 3, 1e-2


def subject():
    graph = example.make_graph(vertices=60, regions=5, near=4, classes=3, dim=6)
    graph = replace(graph, x_VD=graph.x_VD.double())
    torch.manual_seed(0)
    model = example.DeepGraph(graph, LAYERS, 8).double()
    with torch.no_grad():
        model(**example.batch_of(graph))
    return graph, model


def by_hand(graph, model, chunks):
    """Losses and weights of a loop that keeps the tables itself and never calls a layer."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    tables = [block.past_VD.clone() for block in model.blocks]
    losses = []
    for step in range(STEPS):
        order = torch.randperm(chunks, generator=torch.Generator().manual_seed(step)).tolist()
        total = 0.0
        optimizer.zero_grad()
        for chunk in order:
            ids = torch.arange(graph.vertices).chunk(chunks)[chunk]
            place = {int(v): i for i, v in enumerate(ids)}
            h = model.stem(graph.x_VD[ids])
            for block, table in zip(model.blocks, tables, strict=True):
                x = block.norm(h)
                heard = [
                    sum(
                        x[place[int(u)]] if int(u) in place else table[int(u)]
                        for u in graph.near_VK[v]
                    )
                    / graph.near_VK.shape[1]
                    for v in ids
                ]
                table[ids] = x.detach()
                h = h + F.relu(block.own(x) + block.near(torch.stack(heard)))
            logits = model.head(model.norm(h))
            each = F.cross_entropy(logits, graph.labels_V[ids], reduction="none")
            loss = each[graph.train_V[ids]].sum() / graph.train_V.sum()
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def check(losses, weights, wanted):
    assert losses == pytest.approx(wanted[0], rel=1e-10)
    for name, weight in wanted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_one_worker_gives_the_numbers_of_a_loop_by_hand(chunks):
    graph, model = subject()
    wanted = by_hand(graph, model, chunks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    job = outsize.prepare(
        model, optimizer, loss=example.loss_sum, count=example.known, microbatches=chunks
    )
    losses = [float(job.step(example.batch_of(graph, chunks, step))) for step in range(STEPS)]
    check(losses, dict(job.weights()), wanted)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1f1b", CHUNKS),
        ("gpipe", CHUNKS),
        ("zb-h1", CHUNKS),
        ("interleaved:2", CHUNKS),
        ("1f1b", 1),
    ],
)
def test_workers_of_a_pipeline_give_the_same_whatever_the_schedule(schedule, chunks):
    graph, model = subject()
    wanted = by_hand(graph, model, chunks)
    count = LAYERS + 2
    plan = Plan(
        count, per_segment(count), graph.vertices, graph.vertices // chunks, 0,
        Precision.named("float64"), mesh=Mesh(pipeline=2), pipeline=Pipelined(schedule),
    )  # fmt: skip
    models = [copy.deepcopy(model) for _ in range(2)]

    def run(world):
        mine = models[world.rank]
        blocks = find_blocks(mine)
        part = cut(example.batch_of(graph, chunks), 0, plan.microbatch_rows)
        reach = reach_of(mine, blocks, example.loss_sum, part)
        flow = AdoptedFlow(
            mine, blocks, plan, example.loss_sum, cut,
            lambda batch: torch.tensor(example.known(batch), dtype=torch.float64), reach,
        )  # fmt: skip
        job = Job(flow, plan, Recipe(AdamW(betas=(0.9, 0.999), weight_decay=0.0)), Here(world))
        losses = [
            float(job.step(example.batch_of(graph, chunks, step), RATE)) for step in range(STEPS)
        ]
        weights = {name: weight.clone() for name, weight in job.weights()}
        job.close()
        return losses, weights

    for losses, weights in play(plan.mesh, run):
        check(losses, weights, wanted)


def test_the_graph_is_what_it_says():
    graph = example.make_graph(vertices=1000, regions=4, near=8)
    region = torch.arange(1000) * 4 // 1000
    assert not bool((graph.near_VK == torch.arange(1000)[:, None]).any())
    within = (region[graph.near_VK] == region[:, None]).double().mean()
    alike = (graph.labels_V[graph.near_VK] == graph.labels_V[:, None]).double().mean()
    assert float(within) == pytest.approx(0.8, abs=0.02)
    assert float(alike) == pytest.approx(0.5, abs=0.02)
    again = example.make_graph(vertices=1000, regions=4, near=8)
    assert torch.equal(graph.x_VD, again.x_VD)


def test_every_vertex_is_in_a_step_once_in_an_order_that_changes():
    graph = example.make_graph(vertices=100, regions=5, near=3)
    orders = [example.batch_of(graph, 5, step)["ids"] for step in range(3)]
    assert all(torch.equal(ids.sort().values, torch.arange(100)) for ids in orders)
    assert len({tuple(ids.tolist()) for ids in orders}) > 1
