"""Claim: a model far larger than the device is fine-tuned by losses alone, almost as fast.

Wang et al., "ZO2: Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models with
Limited GPU Memory", 2025: OPT-175B in 18 GB of device memory, with almost no time added to
zeroth-order steps whose weights all lie on the device, and the same numbers.

Bytes of the large shapes are predicted: the pool and the copy are those that a job on tensors
without memory allocates, what a block needs while it runs is counted on such tensors too. The same
sum is held against the ledger's peak of a small job that really streams, from memory and from disk,
whose steps are timed against the resident job's, bit for bit equal.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from verdict import Figure, conclude

from outsize.data import Batch
from outsize.memory import Ledger
from outsize.memory.disk import DiskStore
from outsize.memory.sizes import format_bytes
from outsize.memory.store import MemoryStore, Store
from outsize.models.build import build
from outsize.models.config import DecoderConfig
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.plan import Plan, Precision
from outsize.plan.plan import Rest, per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.runtime.special.forwards import Zeroth
from outsize.runtime.special.perturb import Direction
from outsize.simulate.rehearse import Nowhere

PAPER = 18e9  # bytes
LOGIT_TOKENS = 512
BF16 = Precision("bfloat16", None, "bfloat16", "bfloat16")
ROWS, SEQUENCE, ROUNDS = 8, 512, 5
ADAMW = 18  # bytes a parameter: bfloat16, float32 master, gradients and two moments


@dataclass(frozen=True)
class Predicted:
    """Bytes: of all weights, of the pool, of the copy a stage computes with, of a step's hidden
    states and what its costliest stage needs beside them. parameters: their number."""

    weights: int
    pool: int
    copy: int
    beside: int
    parameters: int

    @property
    def device(self) -> int:
        return self.pool + self.copy + self.beside


def opt(hidden: int, layers: int, heads: int) -> DecoderConfig:
    """An OPT of the authors' sizes, as the GPT that it is."""
    return parse(
        {
            "model_type": "gpt2", "vocab_size": 50272, "n_embd": hidden, "n_layer": layers,
            "n_head": heads, "n_positions": 2048, "tie_word_embeddings": True,
        }
    )  # fmt: skip


def plan_of(
    config: DecoderConfig, tier: str, rows: int, sequence: int, precision: Precision
) -> Plan:
    count = len(config.layers) + 2
    stages = tuple(replace(stage, rest=Rest(tier)) for stage in per_segment(count))
    names = ("zeroth-order", "bfloat16-weights")
    return Plan(count, stages, rows, rows, sequence, precision, LOGIT_TOKENS, approximate=names)


def beside(model: Decoder, tokens: int, sequence: int, dtype: torch.dtype) -> int:
    """Bytes of what a step needs beside weights: called in a fake mode. Two hidden states, and the
    larger of a block at work and the loss."""
    bounds = tuple(range(0, tokens + 1, sequence))
    hidden = model.prologue.tokens.weight.shape[1]
    x_TD = torch.empty(tokens, hidden, dtype=dtype)
    context = model.context(torch.zeros(tokens, dtype=torch.int64), bounds)
    with torch.no_grad(), Ledger() as ledger:
        model.blocks[0](x_TD, context)
    vocabulary = model.epilogue.head.weight.shape[0]
    logits = min(LOGIT_TOKENS, tokens) * vocabulary * dtype.itemsize + x_TD.nbytes
    return 2 * x_TD.nbytes + max(ledger.peak, logits)


def predict(config: DecoderConfig, rows: int, sequence: int, precision: Precision) -> Predicted:
    plan, ledger = plan_of(config, "host", rows, sequence, precision), Ledger()
    dtype = getattr(torch, precision.compute)
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        model = Decoder(config)
        torch.set_default_dtype(torch.float32)
        need = beside(model, rows * sequence, sequence, dtype)
        here = Here(ledger=ledger, stores={"host": Nowhere()})
        job = Job(NativeFlow(model, plan), plan, Recipe(Zeroth()), here)
    numel = sum(table.numel for table in job.placement.chunks.tables)
    live = ledger.live
    return Predicted(numel * dtype.itemsize, live["window"], live["workspace"], need, numel)


def batch_of(vocabulary: int) -> Batch:
    ids = torch.randint(0, vocabulary, (ROWS, SEQUENCE + 1))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), ((0, SEQUENCE),) * ROWS)


def measured(config: DecoderConfig, told: Predicted) -> tuple[dict[str, float], float, bool]:
    """Seconds of a step by where the weights rest; the peak over the predicted one; equal bits."""
    precision, batch = Precision.named("float32"), batch_of(256)
    size = 4 * told.parameters + (1 << 20) * 64
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Store] = {
            "host": MemoryStore("host", size), "disk": DiskStore("disk", [Path(folder)], size)
        }  # fmt: skip
        jobs, ledger = {}, Ledger()
        for tier in ("device", "host", "disk"):
            plan = plan_of(config, tier, ROWS, SEQUENCE, precision)
            flow = NativeFlow(build(config, seed=1), plan)
            here = Here(ledger=ledger if tier == "disk" else None, stores=stores)
            jobs[tier] = Job(flow, plan, Recipe(Zeroth(1e-4)), here)
        seconds: dict[str, list[float]] = {tier: [] for tier in jobs}
        losses: dict[str, list[Tensor]] = {tier: [] for tier in jobs}
        for _ in range(ROUNDS):
            for tier, job in jobs.items():
                losses[tier].append(job.step(batch))
                seconds[tier].append(job.report.seconds)
        peak = jobs["disk"].report.trace.peak()
        pairs = [
            zip(*(jobs[t].weights() for t in ("device", other)), strict=True)
            for other in ("host", "disk")
        ]
        equal = all(torch.equal(a, b) for pair in pairs for (_, a), (_, b) in pair)
        equal &= losses["device"] == losses["host"] == losses["disk"]
        stores["disk"].close()
    return {tier: min(times[1:]) for tier, times in seconds.items()}, peak / told.device, equal


def drawing(numel: int) -> float:
    """Seconds for the numbers of one step: its own direction and that of the step before."""
    flat = torch.zeros(min(numel, 1 << 21))
    begin = time.perf_counter()
    Direction(0, 0).add(flat, "a", 1.0, flat)
    return 2 * (time.perf_counter() - begin) * numel / len(flat)


def main() -> None:
    torch.manual_seed(0)
    shapes = {
        "llama-7b": parse(PRESETS["llama-7b"]), "OPT-13B": opt(5120, 40, 40),
        "OPT-175B": opt(12288, 96, 96),
    }  # fmt: skip
    device = {}
    for name, config in shapes.items():
        told = predict(config, 1, 2048, BF16)
        device[name] = told.device
        print(
            f"  {name}: {told.parameters / 1e9:.1f}G parameters, {format_bytes(told.weights)} of"
            f" weights below, {format_bytes(told.device)} on the device (pool"
            f" {format_bytes(told.pool)}, copy {format_bytes(told.copy)}, beside"
            f" {format_bytes(told.beside)}); AdamW has {format_bytes(ADAMW * told.parameters)}"
        )
    config = parse(PRESETS["small"])
    told = predict(config, ROWS, SEQUENCE, Precision.named("float32"))
    seconds, share, equal = measured(config, told)
    added = {tier: seconds[tier] / seconds["device"] - 1 for tier in ("host", "disk")}
    drawn = drawing(told.parameters)
    conclude(
        'Wang et al., "ZO2", 2025',
        "OPT-175B in 18 GB of device memory, almost no time added, the same numbers",
        f"(predicted) OPT-175B in {device['OPT-175B'] / 1e9:.1f} GB, OPT-13B in"
        f" {device['OPT-13B'] / 1e9:.1f} GB; (measured) a step of {seconds['device']:.2f} s takes"
        f" {added['host']:+.1%} with weights in memory and {added['disk']:+.1%} on disk,"
        f" {drawn / seconds['device']:.0%} of it draws numbers; measured peak {share:.3f}x of the"
        f" predicted; bits {'equal' if equal else 'DIFFER'}",
        f"large shapes: 1 x 2048 tokens, bfloat16; timed: the small preset (5M), {ROWS} x"
        f" {SEQUENCE} tokens a step, float32, minima of {ROUNDS - 1} interleaved steps",
        Figure(
            "GB of device memory, OPT-175B",
            device["OPT-175B"] / 1e9,
            PAPER / 1e9,
            "",
            nothing=ADAMW * 175,
            less=True,
            how="simulated",
        ),
        Figure(
            "time added to a step",
            max(added.values()),
            0.0,
            "%",
            nothing=1.0,
            less=True,
            timed=True,
            other="a small model",
        ),
        holds={"bits equal": equal, "measured peak as predicted": 0.9 < share < 1.05},
    )


if __name__ == "__main__":
    main()
