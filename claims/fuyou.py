"""Claim: with the disk as a planned dimension, updates hide behind the backward pass.

Liao et al., "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU"
(Fuyou), 2024: 3.42 times ZeRO-Infinity's throughput for 13G parameters on an RTX 4090, whose
updates stand apart, one subgroup at a time. Simulated on that device with their disks; updates
behind the backward pass and apart are one plan's two values, and the parts of a stage's update that
are in the pool together a third. All are run for real as well: weights must be equal.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace

import tiered
from verdict import Figure, conclude

from outsize.memory.sizes import format_bytes
from outsize.plan import Plan, Stream
from outsize.simulate import Forecast

REAL = tiered.llama(256, 6, 8)
LARGE = tiered.llama(5120, 40, 40, 32000, 13824)
ROWS, SEQUENCE = 32, 1024
DISK = (21.0, 16.0)  # GB/s: twelve PCIe 4 disks behind one root, as the paper's server
REACHED, CLAIMED = 0.8, 3.42
WAYS = (("behind", 24), ("behind", 1), ("apart", 24), ("apart", 1))


def forecast(update: str, parts: int, on_disk: bool = True) -> Forecast:
    hardware = tiered.machine(
        "RTX-4090", REACHED, [tiered.tier("disk", *DISK, "Fuyou's server, declared")]
    )
    rest = tiered.ON_DISK if on_disk else tiered.STATES_ON_DISK
    plan = tiered.plan_of(
        LARGE, ROWS, SEQUENCE, rest, precision="bfloat16", microbatches=ROWS // 2, update=update,
        stream=Stream(part=1 << 24, parts=parts),
    )  # fmt: skip
    return tiered.simulated(LARGE, plan, hardware)


def real() -> tuple[bool, dict[str, float]]:
    """Whether weights are equal however updates stand, and seconds of the quickest step."""
    base = tiered.plan_of(REAL, 2, 128, stream=Stream(part=1 << 20))
    plans: dict[str, Plan] = {"resident": base}
    for update in ("behind", "apart"):
        stages = tiered.ends_keep(base.stages, tiered.ON_DISK)
        plans[update] = replace(base, update=update, stages=stages)
    with tempfile.TemporaryDirectory() as folder:
        ran = {
            n: tiered.train(REAL, p, [tiered.disk(folder, tiered.GIB)]) for n, p in plans.items()
        }
    same = all(r.equals(ran["resident"]) for r in ran.values())
    return same, {name: r.seconds for name, r in ran.items()}


def main() -> None:
    same, seconds = real()
    made = {(update, parts): forecast(update, parts) for update, parts in WAYS}
    for (update, parts), one in made.items():
        share = tiered.computing(one.trace) / one.seconds
        print(
            f"  simulated, {update}, {parts} parts together: {one.seconds:.1f} s a step,"
            f" {share:.0%} computing, peak {format_bytes(one.peak)}"
        )
    ours, theirs = made[WAYS[0]], made[WAYS[-1]]
    gain = theirs.seconds / ours.seconds
    fits = tiered.machine("RTX-4090", REACHED, []).devices[0].memory_bytes
    print(f"  real: {', '.join(f'{name} {s:.2f} s a step' for name, s in seconds.items())}")
    keep = forecast(*WAYS[0], on_disk=False)
    print(f"  simulated, activations of block boundaries kept: peak {format_bytes(keep.peak)}")
    conclude(
        "Liao et al., Fuyou, 2024",
        f"{CLAIMED} times ZeRO-Infinity, whose updates stand apart",
        f"(simulated) {gain:.2f} times the speed of updates apart, one part at a time; weights"
        f" of real runs {'equal bit for bit' if same else 'DIFFER'}",
        f"13G parameters, {ROWS * SEQUENCE:,} tokens a step, RTX 4090 at {REACHED:.0%} of its peak,"
        f" disks {DISK[0]:.0f} GB/s read, {DISK[1]:.0f} written, activations and all states there",
        Figure("speed over updates apart", gain, CLAIMED, how="simulated"),
        holds={"weights equal bit for bit": same, "fits the device": ours.peak <= fits},
    )


if __name__ == "__main__":
    main()
