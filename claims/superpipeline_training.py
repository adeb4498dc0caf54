"""Claim: moving layers in and out, k at a time, cuts the memory of training by up to 60%.

"Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models", 2024: k layers
resident, k' given back at a time. Bytes are the ledger's, in real runs of a GPT of 12 blocks with
all states on disk, against the same plan with all of them resident; the output is compared bit for
bit. The sweep over k and k' is printed with real times.
"""

from __future__ import annotations

import tempfile

import tiered
from verdict import Figure, conclude

from outsize.memory.sizes import format_bytes
from outsize.plan import Plan, Rest, Stream

CONFIG = tiered.gpt(512, 12, 8, vocabulary=8192)
ROWS, SEQUENCE = 4, 128
SWEEP = ((2, 1), (3, 1), (4, 1), (4, 2), (6, 3))
CLAIMED = 0.6


def plan(rest: Rest, k: int = 2, returned: int = 1) -> Plan:
    stream = Stream(k, returned, part=1 << 20)
    return tiered.plan_of(CONFIG, ROWS, SEQUENCE, rest, stream=stream)


def main() -> None:
    resident = tiered.train(CONFIG, plan(Rest()), steps=2)
    ratios, slower, same = [], [], True
    with tempfile.TemporaryDirectory() as folder:
        for k, returned in SWEEP:
            tiers = [tiered.disk(folder, tiered.GIB)]
            ran = tiered.train(CONFIG, plan(tiered.ON_DISK, k, returned), tiers, steps=2)
            ratios.append(ran.peak / resident.peak)
            slower.append(ran.seconds / resident.seconds)
            same = same and ran.equals(resident)
            print(
                f"  k {k}, k' {returned}: peak {format_bytes(ran.peak)}, {ratios[-1]:.2f} of"
                f" resident ({format_bytes(resident.peak)}); {ran.seconds:.2f} s a step,"
                f" {slower[-1]:.2f}x"
            )
    best = min(ratios)
    conclude(
        '"Superpipeline", 2024',
        f"up to {CLAIMED:.0%} less memory at acceptable speed, output unchanged",
        f"{1 - best:.0%} less ({best:.2f} of resident) at {slower[0]:.2f}x the"
        f" time; losses and weights {'equal bit for bit' if same else 'DIFFER'}",
        f"GPT of {len(CONFIG.layers)} blocks, hidden {CONFIG.hidden}, full fine-tuning, AdamW,"
        f" float32, {ROWS} rows of {SEQUENCE}, blocks recomputed in both, all states and"
        " activations on disk; ledger peaks",
        Figure("less memory", 1 - best, CLAIMED, "%", nothing=0.0),
        holds={"losses and weights equal bit for bit": same},
    )


if __name__ == "__main__":
    main()
