"""Streaming against holding: one model trained with every state on the device, and with every state
on a disk behind a small pool, steps of the two in turn; below and above the threshold.

    python benchmarks/streamed.py [--disk DIR] [--steps 3]

A decoder of 113M parameters in float32 with AdamW, updates behind the backward pass, blocks
computed again in both. Losses must be equal bit for bit. The threshold is the tokens of a step from
which the disk hides (`outsize plan` prints it; docs/memory.md has the formula): above it the
streamed run must reach 0.7 of the resident tokens/s, below it its step must take what was predicted
within 15%.
Exit code 1 where a target is missed. Let the machine be quiet.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from support import streaming

from outsize.hardware.probe import probe
from outsize.memory.tiers import disk_tier, measured, open_stores
from outsize.models.config import DecoderConfig
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Precision, Rest, Stream
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.search import PlanRequest

RATIO, PREDICTED = 0.7, 0.15
BELOW, ABOVE = 64, 2048  # tokens of a step
BELOW_ALL = Rest("disk", "disk", "disk", "device")


def shape() -> DecoderConfig:
    return parse({
        "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "vocab_size": 16384,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False,
    })  # fmt: skip


def compare(tokens: int, folder: str, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step: resident, streamed, and streamed as predicted."""
    config = shape()
    work = streaming.work_of(tokens, min(tokens, 512), 1, Precision())
    spec = disk_tier(folder)
    hardware = streaming.with_tiers(
        probe("cpu"), [measured(spec, datetime.date.today().isoformat())]
    )
    bounds = (0, work.sequence)
    request = PlanRequest(
        work.rows, work.sequence, work.precision, AdamW(), clip=None, documents=bounds
    )
    stream = Stream(parts=4, part=1 << 21)
    plans = [streaming.plan_of(config, work, rest, stream) for rest in (Rest(), BELOW_ALL)]
    forecast = streaming.predict_sampled(config, request, plans[1], hardware)
    seconds: tuple[list[float], list[float]] = ([], [])
    with open_stores([spec]) as stores:
        jobs = []
        for plan in plans:
            model = streaming.shells(config, torch.float32)
            jobs.append(
                Job(
                    NativeFlow(model, plan),
                    plan,
                    Recipe(AdamW()),
                    Here(stores=stores),
                    fill=streaming.quick_fill(model, 0),
                )
            )
        for step in range(steps + 1):
            batch = streaming.random_batch(config, work, step)
            losses = []
            for job, times in zip(jobs, seconds, strict=True):
                losses.append(float(job.step(batch)))
                times.append(job.report.seconds)
            if losses[0] != losses[1]:
                raise SystemExit(f"step {step}: losses {losses} differ")
        for job in jobs:
            job.close()
    return median(seconds[0][1:]), median(seconds[1][1:]), forecast.seconds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    good = True
    for tokens, name in ((ABOVE, "above the threshold"), (BELOW, "below the threshold")):
        held, streamed, told = compare(tokens, str(options.disk), options.steps)
        ratio, away = held / streamed, streamed / told - 1
        met = ratio >= RATIO if tokens == ABOVE else abs(away) <= PREDICTED
        good &= met
        print(
            f"{tokens:5} tokens a step, {name}: resident {held:.2f} s, streamed {streamed:.2f} s:"
            f" {ratio:.2f} of its tokens/s; predicted {told:.2f} s ({away:+.0%}):"
            f" {'met' if met else 'MISSED'}; losses equal bit for bit",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
