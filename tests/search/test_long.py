"""A long sequence on a small device: the planner takes chunks of the sequence with checkpoints
below, and the step holds what it predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rates import known_hardware
from subjects import VOCAB, config_of

from outsize.data import Batch
from outsize.hardware import Rate, Tier
from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest, choose

LAYERS, TOKENS, BUDGET = 8, 1024, 9 << 19
RATE = Rate(1e10, "B/s", "test", "2026-11-22")
MACHINE = known_hardware()
HARDWARE = replace(MACHINE, tiers=(*MACHINE.tiers, Tier("host", 1 << 30, RATE, RATE)))
CONFIG = config_of(
    "llama", hidden_size=64, intermediate_size=160, num_hidden_layers=LAYERS,
    max_position_embeddings=TOKENS,
)  # fmt: skip
WISH = PlanRequest(
    1, TOKENS, Precision.named("float32"), AdamW(), clip=1.0, recompute=("block",),
    documents=(0, TOKENS),
)  # fmt: skip
BLOCKS = Plan(LAYERS + 2, per_segment(LAYERS + 2, ("block",)), 1, 1, TOKENS, loss_chunk=128)


def batch() -> Batch:
    ids = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.roll(ids, -1, 1), ((0, TOKENS),))


def measured(plan: Plan, budget: int | None) -> tuple[list[float], int]:
    """Losses and the highest peak of two steps."""
    host, ledger = MemoryStore("host", 1 << 27), Ledger(budget)
    flow = NativeFlow(build(CONFIG, seed=0), plan)
    job = Job(flow, plan, Recipe(AdamW(), 1.0), Here(ledger=ledger, stores={"host": host}))
    losses, peak = [], 0
    for _ in range(2):
        losses.append(float(job.step(batch(), 1e-3)))
        peak = max(peak, job.report.trace.peak())
    job.close()
    host.close()
    return losses, peak


@pytest.fixture(scope="module")
def resident() -> tuple[list[float], int]:
    """Block recompute, everything on the device."""
    return measured(BLOCKS, None)


def test_the_planner_takes_chunks_with_checkpoints_below(resident):
    budget = BUDGET
    assert resident[1] > 2.5 * budget
    request = replace(WISH, budget=budget, tiers=(TierSpec("host", "memory", (), 1 << 27),))
    made = choose(CONFIG, request, HARDWARE)
    assert made.plan.sequence_chunk > 0
    inner = made.plan.stages[1:-1]
    assert all(stage.whole and stage.rest.activations == "host" for stage in inner)
    losses, peak = measured(made.plan, budget)
    assert 0.95 * made.peak <= peak <= made.peak <= budget
    assert losses == pytest.approx(resident[0], rel=1e-5)
