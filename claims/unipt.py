"""Claim: where a side network alone learns, a step keeps little of what it keeps with LoRA.

Diao et al., "UniPT: Universal Parallel Tuning for Transfer Learning with Efficient Parameter and
Memory", 2024. The paper gives the gigabytes of cards; judged is what was asked of it here, 0.35
times LoRA's activations. The bytes are those that the ledger counts at the peak of a step beyond
what the job holds between steps, of as many blocks as ViT-B has, with adapters of alike many
parameters. Quality is printed beside that: a small decoder over bytes learns one half of Python's
standard library, then is adapted to the package of e-mail.
"""

from __future__ import annotations

import copy

from s2a import BEFORE, CONFIG, HELD, LAYERS, RATES, STEPS, accuracy, tuned
from slimfit import ROWS, SEQUENCE, batches, text
from verdict import Figure, conclude

from outsize.data import Batch
from outsize.memory import Ledger
from outsize.models.adapter import Adapter
from outsize.models.build import adapt, build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.optim import AdamW
from outsize.plan import Plan
from outsize.plan.plan import per_segment
from outsize.runtime import Job, NativeFlow
from outsize.runtime.recipe import Here, Recipe
from outsize.techniques.adapt.lora import Lora
from outsize.techniques.adapt.unipt import UniPT

CLAIMED, RATE = 0.35, 1e-2
WAYS: dict[str, Adapter] = {"LoRA": Lora(1, 2.0), "UniPT": UniPT(16)}


def job_of(model: Decoder, ledger: Ledger | None = None) -> Job:
    """A job that trains the adapter of a model."""
    size = len(model.blocks) + 2
    plan = Plan(size, per_segment(size), ROWS, ROWS, SEQUENCE)
    recipe = Recipe(AdamW(weight_decay=0.0), 1.0)
    return Job(NativeFlow(model, plan), plan, recipe, Here(ledger=ledger))


def activations(model: Decoder, batch: Batch) -> int:
    """Bytes at the peak of a step beyond what the job holds between steps."""
    job = job_of(model, Ledger())
    job.step(batch, 0.0)
    trace = job.report.trace
    job.close()
    return trace.peak() - sum(trace.events[-1].live.values())


def main() -> None:
    general, special = text("[a-m]*.py", 1 << 21), text("email/*.py", 1 << 20)
    cut = len(special) * 4 // 5
    base = build(parse(CONFIG), seed=1)
    tuned(base, "all", batches(general, BEFORE, 1), RATES["all"]).close()
    held, tuning = batches(special[cut:], HELD, 2), batches(special[:cut], STEPS, 3)
    before, found = accuracy(base, held), dict[str, tuple[int, float, int]]()
    for name, adapter in WAYS.items():
        model = adapt(copy.deepcopy(base), adapter, 1)
        learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
        peak, job = activations(model, tuning[0]), job_of(model)
        for step, batch in enumerate(tuning):
            job.step(batch, RATE * (1 - step / len(tuning)))
        job.close()
        found[name] = peak, accuracy(model, held), learnt
        print(
            f"  {name}: {learnt:,} parameters, {peak / 2**20:.2f} MiB, {found[name][1]:.1%} right"
            f" (before {before:.1%})",
            flush=True,
        )
    (theirs, low_rank, a), (ours, side, b) = found["LoRA"], found["UniPT"]
    conclude(
        'Diao et al., "UniPT", 2024',
        f"{CLAIMED}x of LoRA's activations (what was asked here: the paper gives gigabytes)",
        f"{ours / theirs:.2f}x of LoRA's bytes of activations, with {b:,} parameters for {a:,};"
        f" bytes foretold before {before:.1%}, with LoRA {low_rank:.1%}, with UniPT {side:.1%}",
        f"{LAYERS} blocks of 64 as GPT-2 has them, bytes of Python files, {STEPS} steps of"
        f" {ROWS} x {SEQUENCE}, float32, AdamW",
        Figure("of LoRA's bytes of activations", ours / theirs, CLAIMED, less=True),
    )


if __name__ == "__main__":
    main()
