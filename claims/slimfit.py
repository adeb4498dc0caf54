"""Claim: with most layers frozen and activations in 8 bits, a step holds less than half.

Ardakani et al., "SlimFit: Memory-Efficient Fine-Tuning of Transformer-based Models Using Training
Dynamics", 2023: up to 95% of the layers frozen, 2.2 times less memory on average (what a frozen
layer cannot drop is quantised, and pruned, which is not built here), 0.2% of accuracy lost on
average, at most 0.4%.

The bytes are all that the ledger counts at the peak of a step of 64 rows (the paper's have 32 to
128). The quality is that of a small decoder over bytes, which learns one half of Python's standard
library, by file, then is fine-tuned on something else, the package of e-mail: for so few steps that
a layer which is trained in one of twenty has hardly been trained.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from verdict import Figure, conclude

from outsize.data import Batch
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.frozen_by_dynamics import KEY, FrozenByDynamics

LAYERS, HIDDEN, ROWS, SEQUENCE = 6, 64, 8, 64
BATCH = 64  # rows of the step whose memory is counted
BEFORE, STEPS, HELD, RATE = 150, 200, 16, 3e-3
WAYS = ((0.0, "whole"), (0.0, "int8"), (0.5, "int8"), (0.95, "whole"), (0.95, "int8"))
CLAIMED = 2.2  # times fewer bytes
Keep = Literal["whole", "int8"]
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": HIDDEN, "intermediate_size": 176,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": SEQUENCE, "initializer_range": 0.125, "tie_word_embeddings": False,
}  # fmt: skip


def plan_of(rows: int) -> Plan:
    """All rows at a time."""
    stages = per_segment(LAYERS + 2)
    return Plan(LAYERS + 2, stages, rows, rows, SEQUENCE, approximate=("frozen-by-dynamics",))


PLAN = plan_of(ROWS)


def text(pattern: str, most: int) -> Tensor:
    """Bytes of files of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob(pattern))
    return torch.frombuffer(
        bytearray(b"".join(map(Path.read_bytes, files))[:most]), dtype=torch.uint8
    )


def batches(data: Tensor, count: int, seed: int, size: int = ROWS) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (size,), generator=generator)
        rows = torch.stack([data[s : s + SEQUENCE + 1] for s in starts.tolist()]).long()
        made.append(
            Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), ((0, SEQUENCE),) * size)
        )
    return made


def trained(model: Decoder, data: Sequence[Batch], share: float, keep: Keep) -> Job:
    """The job behind its last step. The learning rate falls to 0."""
    said = {KEY: FrozenByDynamics(share, keep)}
    recipe = Recipe(AdamW(weight_decay=0.0), 1.0, techniques=said)
    job = Job(NativeFlow(model, PLAN), PLAN, recipe)
    for step, batch in enumerate(data):
        job.step(batch, RATE * (1 - step / len(data)))
    return job


def peak(model: Decoder, batch: Batch, share: float, keep: Keep) -> tuple[int, int]:
    """Bytes at the peak of a step, and of them those beyond what the job holds between steps."""
    ledger, plan = Ledger(), plan_of(BATCH)
    recipe = Recipe(AdamW(), techniques={KEY: FrozenByDynamics(share, keep)})
    job = Job(NativeFlow(model, plan), plan, recipe, Here(ledger=ledger))
    job.step(batch, 0.0)
    trace = job.report.trace
    return trace.peak(), trace.peak() - sum(trace.events[-1].live.values())


def loss_of(job: Job, data: Iterable[Batch]) -> float:
    sums = [job.evaluate(batch, ROWS) for batch in data]
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def main() -> None:
    general, special = text("[a-m]*.py", 1 << 21), text("email/*.py", 1 << 20)
    cut = len(special) * 4 // 5
    model = build(parse(CONFIG), seed=1)
    base = trained(model, batches(general, BEFORE, 1), 0.0, "whole")
    held, tuning = batches(special[cut:], HELD, 2), batches(special[:cut], STEPS, 3)
    before = loss_of(base, held)
    base.close()
    losses, peaks, passing = {}, {}, {}
    (large,) = batches(special, 1, 4, BATCH)
    for way in WAYS:
        peaks[way], passing[way] = peak(copy.deepcopy(model), large, *way)
        losses[way] = loss_of(trained(copy.deepcopy(model), tuning, *way), held)
        share, keep = way
        print(
            f"  {share:.0%} frozen, activations {keep}: {peaks[way] / 2**20:.2f} MiB, loss"
            f" {losses[way]:.4f} (before {before:.4f})",
            flush=True,
        )
    full, eight, half, bare, most = WAYS
    less = {way: peaks[full] / peaks[way] for way in WAYS}
    fewer = passing[full] / passing[most]
    worse = {way: losses[way] / losses[full] - 1 for way in WAYS}
    conclude(
        'Ardakani et al., "SlimFit", 2023',
        "2.2x less memory with up to 95% of layers frozen and activations quantised",
        f"{less[most]:.2f}x less memory at 95% frozen in 8 bits"
        f" ({less[eight]:.2f}x by 8 bits alone, {less[bare]:.2f}x by freezing alone;"
        f" {fewer:.2f}x fewer bytes of activations); loss {worse[eight]:+.1%} by 8 bits,"
        f" {worse[half]:+.1%} at 50% frozen, {worse[most]:+.1%}"
        f" at 95% after {STEPS} steps",
        f"{LAYERS} blocks of {HIDDEN}, bytes of Python files, {STEPS} steps of {ROWS} x {SEQUENCE},"
        f" float32, AdamW at {RATE:g}; memory at the peak of a step of {BATCH} x {SEQUENCE}, in"
        " which buffers of gradients and moments stay",
        Figure("less memory", less[most], CLAIMED),
        Figure("loss of quality at 95% frozen", worse[most], 0.004, "%", nothing=1.0, less=True),
    )


if __name__ == "__main__":
    main()
