"""What is foretold of a plan for the device of the tests, and what its allocator counts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from streamed import disk
from subjects import config_of

from outsize import accelerator
from outsize.collectives import Lone, World
from outsize.hardware import Hardware, Rate, Tier, catalogue
from outsize.memory import Meter
from outsize.memory.tiers import TierSpec
from outsize.models.build import shells
from outsize.models.config import DecoderConfig
from outsize.optim import AdamW
from outsize.plan import Plan, Precision
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest

ROWS, SEQUENCE, BOUNDS = 4, 32, (0, 9, 32)
OVER = 1.02  # of the allocator's figure: the most that is foretold


def decoder(layers: int = 3) -> DecoderConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 256}
    return config_of("llama, untied", num_hidden_layers=layers, **sizes)


def asked(device: torch.device, precision: Precision) -> PlanRequest:
    tiers = (
        TierSpec("host", "memory", (), 1 << 26),
        TierSpec("disk", "disk", (Path("."),), 1 << 26),
    )
    return PlanRequest(
        ROWS, SEQUENCE, precision, AdamW(), 1.0, documents=BOUNDS, tiers=tiers, apart=True,
        kind=device.type, grain=accelerator.grain(device),
    )  # fmt: skip


def hardware(devices: int = 1) -> Hardware:
    rate, known = Rate(1e9, "B/s", "test", "2026-11-24"), catalogue("H200", devices)
    tiers = [tier for tier in known.tiers if tier.name not in ("host", "disk")]
    below = (Tier(name, 1 << 30, rate, rate) for name in ("host", "disk"))
    return replace(known, tiers=(*tiers, *below))


def measured(
    config: DecoderConfig,
    plan: Plan,
    ledger: Meter,
    device: torch.device,
    world: World | None = None,
) -> tuple[int, int]:
    """The allocator's peak while a job begins and makes two steps, and that of an evaluation."""
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    with TemporaryDirectory() as folder, disk(Path(folder)) as stores:
        model = shells(config, torch.float32, device)
        here = Here(world or Lone(), ledger, stores)
        with closing(
            make_job(NativeModel(model, fill=_fill), plan, Recipe(AdamW(), 1.0), here)
        ) as job:
            peak = torch.accelerator.max_memory_allocated(device) - before
            batch = asked(device, plan.precision).batch(plan.rows, BOUNDS)
            mine = batch.rows(*plan.rows_at(job.place))
            for _ in range(2):
                job.step(mine.changed(torch.clone, mine.bounds), 1e-3)
                peak = max(peak, job.report.trace.peak())
            rows = plan.microbatch_size
            job.evaluate(batch.rows(0, rows), rows)
            return peak, max((ran.peak for ran in job.evaluated), default=0)


def _fill(name: str, out: torch.Tensor) -> None:
    out.fill_(1.0 if "norm" in name else 0.0)
