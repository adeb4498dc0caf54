"""The loop's step, far into a run and on a later worker: the rate, the dropout and the place."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from outsize.collectives import Mesh
from outsize.data import Batch, Cursor
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.train.loop import Loop
from outsize.train.resolve import resolve
from outsize.train.state import Place

ROWS, SEQUENCE, STEPS, WARMUP = 5, 8, 3000, 150
KEYS = (
    f"train.steps={STEPS}", f"learning_rate.warmup={WARMUP}", "learning_rate.shape=cosine",
    "learning_rate.final=0.1", "optimizer.lr=0.5", "train.dropout=0.25", "train.seed=7",
)  # fmt: skip


class Job:
    """Keeps what it is asked for."""

    optimizer = SimpleNamespace(lr=0.5)
    stores = MappingProxyType({})
    report = SimpleNamespace(loss=1.0, norm=1.0, seconds=0.25, scaling=None)

    def __init__(self) -> None:
        self.asked: list[tuple[Batch, float]] = []

    def step(self, batch: Batch, lr: float) -> None:
        self.asked.append((batch, lr))


def loop_at(step: int, rank: int, mesh: Mesh) -> Loop:
    setup = SimpleNamespace(
        config=resolve(None, KEYS).config,
        plan=Plan(4, per_segment(4), ROWS, 1, SEQUENCE, mesh=mesh),
        device=torch.device("cpu"),
    )
    return Loop(
        setup, None, Job(), None, SimpleNamespace(write=lambda record: None),
        SimpleNamespace(watch=lambda job, step: True, add=lambda report, counted: None),
        Place(step, STEPS, 10, Cursor(0, 0, 7, SEQUENCE, "")),
        SimpleNamespace(cursor=lambda at: Cursor(at * ROWS, 0, 7, SEQUENCE, "")),
        worker_group=SimpleNamespace(world=SimpleNamespace(rank=rank)),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 99, 100, 149, 150, 1023, 1999, STEPS - 1])
def test_a_step_has_its_rate_its_mask_and_its_place(step, rank):
    ids = torch.zeros(3 - rank, SEQUENCE, dtype=torch.int64)  # of five rows three, and two
    batch = Batch(ids, ids, ((0, SEQUENCE),) * len(ids))
    loop = loop_at(step, rank, Mesh(2))
    loop._step(batch, SimpleNamespace(update=lambda status: None))
    ((asked, lr),) = loop.job.asked
    done = (step - WARMUP) / (STEPS - WARMUP)
    fallen = 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    assert lr == pytest.approx(0.5 * ((step + 1) / WARMUP if step < WARMUP else fallen), rel=1e-12)
    noise = asked.noise
    assert (noise.rate, noise.seed, noise.step) == (0.25, 7, step)
    assert noise.first == (0, 3 * SEQUENCE)[rank], "tokens of the rows before"
    assert loop.place == replace(
        loop.place, step=step + 1, steps=STEPS, tokens=10 + ROWS * SEQUENCE,
        cursor=Cursor((step + 1) * ROWS, 0, 7, SEQUENCE, ""),
    )  # fmt: skip
