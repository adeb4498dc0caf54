"""Pipelines with the activations on the host that the pass over their schedules has chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from away import spills, with_spills
from plain import batches
from streamed import memory, model_of, plan_of, small, snapshot
from subjects import SEQUENCE, VOCAB
from threads import play

from outsize.collectives import Mesh
from outsize.memory import Ledger
from outsize.optim import AdamW
from outsize.plan import Pipelined, Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.schedule import Kind, State
from outsize.schedule.pipelined import bounds_of
from outsize.schedule.pipelines import Shape, named
from outsize.search.pipeline_offload import spilled
from outsize.simulate.coarse import Moving, Times

SEGMENTS, WORKERS, MICROBATCHES = 8, 2, 5


def piped(schedule: str) -> Plan:
    return plan_of(
        "float64", segments=SEGMENTS, rows=2 * MICROBATCHES, microbatch_rows=2,
        mesh=Mesh(pipeline=WORKERS), stages=per_segment(SEGMENTS), pipeline=Pipelined(schedule),
    )  # fmt: skip


def chosen(plan: Plan, part: float) -> tuple[Plan, tuple[frozenset[int], ...]]:
    """The plan with a part of each worker's activations away, and the stages which leave."""
    coarse = named(plan.pipeline.schedule, Shape(WORKERS, MICROBATCHES))
    bounds = bounds_of(plan, coarse.placement.stages)
    pieces = [b - a for a, b in pairwise(bounds)]
    found = spilled(coarse, Times(1, 1, 1), Moving(0.1, 0.1), part, pieces)
    return with_spills(plan, found.made, bounds), spills(found.made, bounds)


def ran(plan: Plan):
    """By worker: loss, norm, weights and states; most bytes of activations; stages that left."""
    data = batches(1, plan.rows, SEQUENCE, VOCAB)

    def run(world):
        with memory() as stores:
            flow = NativeFlow(model_of("llama", "float64", num_hidden_layers=SEGMENTS - 2), plan)
            job = Job(flow, plan, Recipe(AdamW(), 0.5), Here(world, ledger=Ledger(), stores=stores))
            found = [(float(job.step(batch, 1e-2)), job.report.norm) for batch in data]
            events = job.report.trace.events
            live = max(n for e in events for k, n in e.live.items() if k.endswith("activations"))
            moved = (Kind.EVICT, State.ACTIVATIONS)
            left = {a.stage for a in job.schedule.workers[0] if (a.kind, a.state) == moved}
            states = snapshot(job)
            job.close()
        return found, states, live, left

    return play(plan.mesh, run)


@pytest.fixture(scope="module")
def alone():
    """One worker with the same rows."""
    return ran(replace(piped("1f1b"), mesh=Mesh()))[0]


@pytest.mark.parametrize(
    ("schedule", "part"), [("1f1b", 1.0), ("uniform:2", 0.5), ("chimera", 0.5)]
)
def test_numbers_stay_and_bytes_leave(schedule, part, alone, monkeypatch):
    small(monkeypatch)
    plan = piped(schedule)
    away, stages = chosen(plan, part)
    kept, spilt = ran(plan), ran(away)
    for worker, (here, there) in enumerate(zip(kept, spilt, strict=True)):
        for mine, wanted in zip(there[0], alone[0], strict=True):
            assert mine == pytest.approx(wanted, rel=1e-10)
        for mine, wanted in zip(there[1], alone[1], strict=True):
            for name in wanted:
                torch.testing.assert_close(mine[name], wanted[name], rtol=1e-10, atol=1e-10)
        # On the last worker of a straight pipeline a backward follows too soon on its forward.
        assert there[3] <= frozenset().union(*stages)
        assert not here[3]
        if there[3]:
            assert there[2] < here[2], worker
    assert spilt[0][3]
    # Another route shares a stage with worker 1, which spills it too.
    if schedule != "chimera":
        assert spilt[0][3] == stages[0]
    assert spilt[0][2] < (0.75 if part == 1 else 0.9) * kept[0][2]
