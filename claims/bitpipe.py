"""Claim: BitPipe is 1.05 to 1.28 times as fast as other synchronous pipelines.

Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024, compares with 1F1B, its interleaved form and Chimera. Simulated; the exchange of
gradients between the two copies of each stage is not counted.
"""

from __future__ import annotations

from verdict import Figure, conclude

from outsize.schedule.pipelines import Costs, bitpipe, chimera, interleaved, one_f_one_b
from outsize.simulate.coarse import Times, play

DEVICES, MICROBATCHES, TRANSFER = 8, 8, 0.02
UNCOUNTED = "the exchange of gradients between copies is not counted"


def main() -> None:
    times, costs = Times(1, 1, 1, TRANSFER), Costs(1, 1, 1, TRANSFER)
    ours = play(bitpipe(DEVICES, MICROBATCHES, 2, costs), times).run.makespan
    others = {
        "1F1B": one_f_one_b(DEVICES, MICROBATCHES),
        "interleaved": interleaved(DEVICES, MICROBATCHES, 2),
        "Chimera": chimera(DEVICES, MICROBATCHES, costs),
    }
    gains = {name: play(made, times).run.makespan / ours for name, made in others.items()}
    conclude(
        'Wu et al., "BitPipe", 2024',
        "1.05x to 1.28x the throughput of other synchronous pipelines",
        ", ".join(f"{gain:.2f}x {name}" for name, gain in gains.items()),
        f"simulated, {DEVICES} devices, {MICROBATCHES} microbatches, two chunks a direction,"
        f" F = I = W = 1, transfer {TRANSFER}",
        Figure(
            "over the best of the others",
            min(gains.values()),
            1.05,
            how="simulated",
            other=UNCOUNTED,
        ),
        Figure(
            "over the slowest of the others",
            max(gains.values()),
            1.28,
            how="simulated",
            other=UNCOUNTED,
        ),
    )


if __name__ == "__main__":
    main()
