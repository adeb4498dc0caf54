"""Claim: parameters, gradients and optimizer states cut over different workers each do better.

"InternEvo: Efficient Long-sequence Large Language Model Training via Hybrid Parallelism and
Redundant Sharding", 2024: sharding dimensions of a hierarchical space. Simulated on the authors'
machines (8 A100 of 80 GB, 4 cards of 100 Gb/s), their 7B model at 4 microbatches of 2 x 2,048,
against the throughput that they publish (InternEvo, doc/en/train_performance.md): optimizer states
over 8 devices against over all. Then all degrees on 128 devices: which of them nothing beats in
both memory and time. That each gives the numbers and bytes of the formulas on real workers is in
claims/zero.py and claims/low_bandwidth.py.
"""

from __future__ import annotations

import sharded
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.hardware import Hardware
from outsize.memory import format_bytes
from outsize.plan import Plan, Sharding, zero
from outsize.simulate import Forecast

CONFIG = sharded.llama(4096, 32, 32, 103168, 11008)
MEMORY = 80e9
REACHED = 0.6  # of an A100's peak: what the authors' 8 devices reach
# Tokens a second and device, published: optimizer states over all devices, over 8.
PUBLISHED = {
    8: (4062, 4078),
    32: (3752, 3919),
    128: (3571, 3928),
    512: (2861, 3835),
    1024: (2271, 3625),
}
TOKENS = 4 * 2 * 2048
WORKERS = 128


def machines() -> Hardware:
    return sharded.cluster("A100-SXM-80", 8, REACHED, network=50 / 8, wait=20e-6)


def plan_of(workers: int, shards: Sharding) -> Plan:
    return sharded.plan_of(CONFIG, Mesh(workers), shards, 8, 2048, 4, sharded.MIXED)


def against_published(forecaster: sharded.Predicted) -> list[tuple[float, float]]:
    """By number of devices, the gain of 8 over all: predicted and published."""
    gains = []
    for workers, published in PUBLISHED.items():
        ways = (zero(1, workers), Sharding(1, 1, 8))
        speeds = [TOKENS / forecaster.of(plan_of(workers, way), machines()).seconds for way in ways]
        gains.append((speeds[1] / speeds[0], published[1] / published[0]))
        print(
            f"  (simulated) {workers} devices, tokens a second and device: over all"
            f" {speeds[0]:,.0f} (published {published[0]:,}), over 8 {speeds[1]:,.0f} (published"
            f" {published[1]:,}): {gains[-1][0]:.3f} times (published {gains[-1][1]:.3f})"
        )
    return gains


def frontier(forecaster: sharded.Predicted) -> list[Sharding]:
    """What nothing beats in memory and time at once."""
    known: dict[Sharding, Forecast] = {
        shards: forecaster.of(plan_of(WORKERS, shards), machines())
        for shards in sharded.degrees(WORKERS, (1, 2, 8, WORKERS))
    }
    kept = []
    for shards, made in sorted(known.items(), key=lambda pair: pair[1].peak):
        if all(made.seconds < known[other].seconds for other in kept):
            kept.append(shards)
            state = sum(made.static.values())
            print(
                f"  (simulated) {WORKERS} devices, {shards.parameters}, {shards.gradients},"
                f" {shards.optimizer}: states and pool {format_bytes(state)}, peak"
                f" {format_bytes(made.peak)}, a step {made.seconds:.2f} s,"
                f" {format_bytes(round(sharded.far(made)))} from other machines"
                f"{'' if made.peak <= MEMORY else ', does not fit'}"
            )
    print(f"  of {len(known)} ways to cut, {len(kept)} are beaten by none")
    return kept


def main() -> None:
    forecaster = sharded.Predicted(CONFIG, sharded.MIXED)
    gains = against_published(forecaster)
    kept = frontier(forecaster)
    stages = {zero(stage, WORKERS) for stage in range(4)}
    others = [shards for shards in kept if shards not in stages]
    predicted, published = gains[-1]
    conclude(
        '"InternEvo", 2024 (independent sharding degrees)',
        f"optimizer states over 8 devices instead of all: {published:.2f} times the speed on 1,024",
        f"(simulated) {predicted:.2f} times on 1,024, {gains[2][0]:.2f} on 128 (published"
        f" {gains[2][1]:.2f}); of {len(kept)} cuts that none beats on {WORKERS} devices,"
        f" {len(others)} are no stage of ZeRO",
        f"7B, 2 + 2 + 12 bytes, {REACHED:.0%} of peak, 6.25 GB/s of a device to other machines, 20"
        " us a message; what networks of a thousand devices lose beyond that is not predicted",
        *(
            Figure(f"speed of 8 over all, {n} devices", ours, paper, how="simulated")
            for n, (ours, paper) in zip(PUBLISHED, gains, strict=True)
            if n > 8
        ),
        holds={"some cuts that none beats are no stage of ZeRO": len(others) > 0},
    )


if __name__ == "__main__":
    main()
