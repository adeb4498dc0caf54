"""A small decoder whose workers have a budget and a disk: what is chosen, and what it gives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from plain import batches

from outsize.collectives import World
from outsize.hardware import Rate, Tier, catalogue
from outsize.memory import Ledger
from outsize.memory.store import MemoryStore
from outsize.memory.tiers import TierSpec
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import ALONE, Here, Recipe
from outsize.search import PlanRequest, choose
from outsize.simulate import Forecast

KIB, MIB = 1 << 10, 1 << 20
ROWS, SEQUENCE, LAYERS = 4, 8, 4
DISK = TierSpec("disk", "disk", (Path("."),), 64 * MIB)
_RATE = Rate(1e9, "B/s", "test", "2026-11-22")
_MACHINE = catalogue("H200", 2)
MACHINE = replace(_MACHINE, tiers=(*_MACHINE.tiers, Tier("disk", 64 * MIB, _RATE, _RATE)))
WISH = PlanRequest(
    ROWS, SEQUENCE, Precision.named("float64"), AdamW(), 0.5, microbatch_rows=1, recompute=(),
    loss_chunk=64, mlp_tile=0, tiers=(DISK,), documents=(0, SEQUENCE),
)  # fmt: skip
LARGER = {"num_hidden_layers": LAYERS, "hidden_size": 48, "intermediate_size": 96}


def chosen(config: DecoderConfig, request: PlanRequest, budget: int) -> Forecast:
    return choose(config, replace(request, budget=budget), MACHINE)


def missing(error: object) -> int:
    found = re.search(r"(\d+) bytes? missing", str(error))
    assert found is not None
    return int(found[1])


def losses(
    config: DecoderConfig,
    plan: Plan,
    request: PlanRequest,
    steps: int,
    world: World = ALONE.world,
    capacity: int = 64 * MIB,
) -> tuple[list[float], int]:
    """(loss and norm of each step, the peak of the last)."""
    store, ledger = MemoryStore("disk", capacity), Ledger()
    job = Job(
        NativeFlow(build(config, seed=0, dtype=torch.float64), plan),
        plan,
        Recipe(request.optimizer, request.clip),
        Here(world, ledger=ledger, stores={"disk": store}),
    )
    found = []
    for batch in batches(steps, ROWS, SEQUENCE, config.vocab):
        own = batch.rows(*plan.rows_at(job.place))  # in memory of its own, as a worker reads it
        loss = job.step(own.changed(torch.clone, own.bounds), 1e-2)
        found += [float(loss), job.report.norm]
    peak = job.report.trace.peak()
    job.close()
    store.close()
    return found, peak
