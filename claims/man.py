"""Claim: blocks that learn by local losses take about half the memory and learn almost as much.

Su et al., "Momentum Auxiliary Network for Supervised Local Learning", 2024: on ImageNet more than
45% less GPU memory than end-to-end training, at higher accuracy; the moving average of the next
block and what learns beside it close the gap that plain local learning leaves.

Here a decoder over bytes of Python files is trained end to end and in groups of blocks for as many
steps: with a norm and a head a group (plain local learning), with a block that learns before it,
and with the momentum auxiliary network. Bytes are those of the ledger at the peak of a step,
parameters, gradients, moments and auxiliary networks included. That it learns more than end-to-end
training, as the paper finds, or more than plain local learning is not claimed here: the difference
between the local ways is no larger than that between seeds.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from verdict import Figure, conclude

from outsize.data import Batch
from outsize.memory import Ledger
from outsize.models.build import build
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Local, Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.making import NativeModel, make_job
from outsize.runtime.recipe import Here, Recipe

LAYERS, HIDDEN, ROWS, SEQUENCE, GROUPS = 12, 64, 16, 128, 4
SEEDS = (1, 2)  # of initial values and of the order of rows
STEPS, HELD, RATE, MOMENTUM = 300, 16, 3e-3, 0.995
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": HIDDEN, "intermediate_size": 176,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": SEQUENCE, "initializer_range": 0.125, "tie_word_embeddings": False,
}  # fmt: skip
EXACT = Plan(LAYERS + 2, per_segment(LAYERS + 2), ROWS, ROWS, SEQUENCE, loss_chunk=512)
TEXT = "bytes of text, not images"
WAYS = ("end to end", "head", "block", "momentum")


def text(most: int) -> Tensor:
    """Bytes of files of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    joined = b"".join(map(Path.read_bytes, files))
    return torch.frombuffer(bytearray(joined[:most]), dtype=torch.uint8)


def batches(data: Tensor, count: int, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (ROWS,), generator=generator)
        rows = torch.stack([data[s : s + SEQUENCE + 1] for s in starts.tolist()]).long()
        ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        made.append(Batch(ids, targets, ((0, SEQUENCE),) * ROWS))
    return made


def job_of(way: str, seed: int, ledger: Ledger | None = None) -> Job:
    model, optimizer = build(parse(CONFIG), seed=seed), AdamW(weight_decay=0.1)
    if way == "end to end":
        return Job(NativeFlow(model, EXACT), EXACT, Recipe(optimizer, 1.0), Here(ledger=ledger))
    local = {"approximate": ("local-learning",), "local": Local(GROUPS, way, MOMENTUM)}
    plan = Plan(**{**vars(EXACT), **local})
    return make_job(NativeModel(model), plan, Recipe(optimizer, 1.0), Here(ledger=ledger))


def peak(way: str, batch: Batch) -> tuple[int, int]:
    """Bytes at the peak of a step, and of these beyond what a job holds between steps."""
    job = job_of(way, 1, Ledger())
    job.step(batch, 0.0)
    trace = job.report.trace
    states = trace.events[-1].live
    static = sum(states.get(f"device/{k}", 0) for k in ("parameters", "gradients", "optimizer"))
    return trace.peak(), trace.peak() - static


def loss(way: str, seed: int, train: list[Batch], held: list[Batch]) -> float:
    """On held-out rows, in bits a byte."""
    job = job_of(way, seed)
    for step, batch in enumerate(train):
        warm = min(1.0, (step + 1) / 30)
        job.step(batch, RATE * warm * (0.05 + 0.95 * (1 - step / len(train))))
    sums = [job.evaluate(batch, ROWS) for batch in held]
    return sum(s for s, _ in sums) / sum(n for _, n in sums) / math.log(2)


def main() -> None:
    data = text(1 << 22)
    cut = len(data) * 9 // 10
    held = batches(data[cut:], HELD, 0)
    train = {seed: batches(data[:cut], STEPS, seed) for seed in SEEDS}
    peaks, losses = {}, {}
    for way in WAYS:
        found = [loss(way, seed, train[seed], held) for seed in SEEDS]
        peaks[way], losses[way] = peak(way, train[SEEDS[0]][0]), fmean(found)
        whole, beside = peaks[way]
        print(
            f"  {way}: {whole / 2**20:.1f} MiB, {beside / 2**20:.1f} beside states;"
            f" {', '.join(f'{bits:.3f}' for bits in found)} bits a byte",
            flush=True,
        )
    less = {way: 1 - peaks[way][0] / peaks["end to end"][0] for way in WAYS}
    states = 1 - peaks["momentum"][1] / peaks["end to end"][1]
    gap = {way: losses[way] / losses["end to end"] - 1 for way in WAYS}
    conclude(
        'Su et al., "MAN", 2024',
        "more than 45% less memory than end-to-end training, at an accuracy like it",
        f"{less['momentum']:.0%} less memory ({states:.0%} beside states; {less['head']:.0%} with"
        f" heads alone); bits a byte {gap['momentum']:+.1%} from end to end, with a block that"
        f" learns {gap['block']:+.1%}, with heads alone {gap['head']:+.1%}",
        f"{LAYERS} blocks of {HIDDEN} in {GROUPS} groups, {STEPS} steps of {ROWS} x {SEQUENCE}"
        f" bytes of Python files, mean of {len(SEEDS)} seeds, AdamW at {RATE:g}, float32, momentum"
        f" {MOMENTUM}",
        Figure("less memory than end to end", less["momentum"], 0.45, "%", nothing=0.0, other=TEXT),
        Figure(
            "bits a byte above end to end",
            gap["momentum"],
            0.0,
            "%",
            nothing=1.0,
            less=True,
            other=TEXT,
        ),
    )


if __name__ == "__main__":
    main()
