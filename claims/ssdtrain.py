"""Claim: activations on disk halve their peak at no cost in time.

Wu et al., "SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language Model
Training", 2024: 47% less activation memory, transfers wholly under computation, tensors written
once however often they are saved; the same work is part of the thesis "Code generation and runtime
techniques for enabling data-efficient deep learning training on GPUs", 2024. Peaks are the
ledger's, in real runs whose losses and weights must be equal, with as many blocks as at the paper's
scale, since the number of blocks says what part can leave; the time at that scale is simulated,
with its disks on an A100.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace

import tiered
from verdict import Figure, conclude

from outsize.memory.sizes import format_bytes
from outsize.plan import Plan, Rest
from outsize.trace.trace import Trace

BLOCKS = 5
REAL = tiered.gpt(256, BLOCKS, 8, vocabulary=2048)
LARGE = tiered.gpt(12288, BLOCKS, 96)
ROWS, SEQUENCE = 16, 1024
DISK = (26.0, 24.0)  # GB/s: four P5800X of 6.1 written and 6.6 read
REACHED, CLAIMED = 0.6, 0.47
SPILLED = Rest(activations="disk")


def kept(trace: Trace) -> int:
    """Most bytes of activations at the end of any action."""
    return max(sum(n for k, n in e.live.items() if k.endswith("activations")) for e in trace.events)


def plans(tokens: int) -> tuple[Plan, Plan]:
    """Nothing computed again; activations kept, and on disk."""
    plan = tiered.plan_of(REAL, 4, tokens, recompute=(), update="apart")
    return plan, replace(plan, stages=tiered.ends_keep(plan.stages, SPILLED))


def large() -> tuple[float, float]:
    """Of a step at the paper's scale: activations left, and its time over that of keeping them."""
    source = "SSDTrain's disks, declared"
    hardware = tiered.machine("A100-SXM-40", REACHED, [tiered.tier("disk", *DISK, source)])
    made = []
    for rest in (Rest(), SPILLED):
        plan = tiered.plan_of(
            LARGE, ROWS, SEQUENCE, rest, recompute=(), precision="bfloat16", update="apart"
        )
        made.append(tiered.simulated(LARGE, plan, hardware))
        print(
            f"  simulated, activations {'on disk' if made[1:] else 'kept'}:"
            f" {made[-1].seconds:.2f} s a step, activations {format_bytes(kept(made[-1].trace))}"
        )
    keep, spill = made
    return kept(spill.trace) / kept(keep.trace), spill.seconds / keep.seconds


def main() -> None:
    keep, spill = plans(256)
    resident = tiered.train(REAL, keep, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        ran = tiered.train(REAL, spill, [tiered.disk(folder, 2 * tiered.GIB)], steps=2)
    same = ran.equals(resident)
    left = kept(ran.trace) / kept(resident.trace)
    print(
        f"  real: activations {format_bytes(kept(ran.trace))} of"
        f" {format_bytes(kept(resident.trace))}; {ran.seconds:.2f} s a step on disk,"
        f" {resident.seconds:.2f} kept"
    )
    share, slower = large()
    conclude(
        'Wu et al., "SSDTrain", 2024',
        f"{CLAIMED:.0%} less activation memory at negligible overhead",
        f"real: {1 - left:.0%} less, losses and weights"
        f" {'equal bit for bit' if same else 'DIFFER'}, a step of so small a model"
        f" {ran.seconds / resident.seconds:.2f} times as long; simulated: {1 - share:.0%} less at"
        f" {slower:.4f} times the time",
        f"real: GPT of {len(REAL.layers)} blocks, hidden {REAL.hidden}, float32, nothing"
        f" recomputed; simulated: hidden {LARGE.hidden}, {len(LARGE.layers)} blocks, bfloat16,"
        f" {ROWS * SEQUENCE:,} tokens, A100 at {REACHED:.0%} of its peak, disks {DISK[0]:.0f} GB/s"
        f" read, {DISK[1]:.0f} written",
        Figure("less activation memory", 1 - left, CLAIMED, "%", nothing=0.0),
        Figure(
            "less activation memory at the paper's scale",
            1 - share,
            CLAIMED,
            "%",
            nothing=0.0,
            how="simulated",
        ),
        Figure(  # the paper gives no number but "negligible": none of a thousand
            "step's time at the paper's scale", round(slower, 3), 1.0, nothing=2.0, less=True,
            how="simulated",
        ),
        holds={"losses and weights equal bit for bit": same},
    )  # fmt: skip


if __name__ == "__main__":
    main()
