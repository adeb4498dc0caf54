"""Claim: two stages of the model on each worker give 10% more throughput where batches are small.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021. On emulated devices: eight real workers, the product's schedules `1f1b` and `interleaved:2`,
engine and messages; a pass waits as long as a device would take (claims/paced.py). What its formula
says of the bubble is claims/interleaved.py's.
"""

from __future__ import annotations

import paced
from verdict import Figure, conclude

WORKERS, COUNTS, CHUNKS, PASS = 8, (8, 16), 2, 0.2  # seconds of a worker's forward pass


def main() -> None:
    gains, same = dict[int, float](), True
    for count in COUNTS:
        model = PASS * (1 + paced.BACK) * WORKERS * count
        ways = [
            paced.Way(name, WORKERS, count, WORKERS * CHUNKS, model)
            for name in ("1f1b", f"interleaved:{CHUNKS}")
        ]
        plain, ours = paced.take(ways)
        gains[count] = plain.seconds / ours.seconds - 1
        same &= abs(plain.loss / ours.loss - 1) < 1e-10
    conclude(
        'Narayanan et al., "Efficient Large-Scale Language Model Training", 2021',
        "10% more throughput where batches are small",
        ", ".join(f"{gain:+.1%} at {count} microbatches" for count, gain in gains.items()),
        f"{paced.EMULATED}; {WORKERS} of them, {PASS} s a forward pass of a worker",
        Figure(
            f"gain over 1F1B at {COUNTS[0]} microbatches", gains[COUNTS[0]], 0.1, "%", nothing=0.0,
            how="emulated devices", timed=True,
        ),
        holds={"the same loss": same},
    )  # fmt: skip


if __name__ == "__main__":
    main()
