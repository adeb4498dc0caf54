"""Claim: interleaving divides the pipeline's bubble by the chunks, for 10% more throughput.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021. Simulated: equal stages, a backward of two forwards, transfers that take up to a
twentieth of a stage's forward. The part of the claim about tensor and data parallelism is not
shown here.
"""

from __future__ import annotations

from verdict import Figure, conclude

from outsize.schedule.pipelines import interleaved, one_f_one_b
from outsize.simulate.coarse import Times, play

DEVICES, MICROBATCHES = 8, (8, 16, 32, 64)
TRANSFERS = (0.0, 0.02, 0.05)  # of a stage's forward; the claim is judged at the slowest


def gains(transfer: float) -> list[float]:
    """Of throughput over 1F1B, two chunks, by microbatches."""
    times, found = Times(1, 1, 1, transfer), []
    for microbatches in MICROBATCHES:
        plain = play(one_f_one_b(DEVICES, microbatches), times).run.makespan
        found.append(plain / play(interleaved(DEVICES, microbatches, 2), times).run.makespan - 1)
    return found


def main() -> None:
    exact = True
    for microbatches in MICROBATCHES:
        ideal = 3.0 * microbatches
        for chunks in (2, 4):
            bubble = play(interleaved(DEVICES, microbatches, chunks), Times(1, 1, 1)).run
            wanted = (DEVICES - 1) / (chunks * microbatches)
            exact &= abs(max(bubble.idle_in_makespan) / ideal - wanted) < 1e-9
    found = {transfer: gains(transfer) for transfer in TRANSFERS}
    shown = "; ".join(
        f"{', '.join(f'{gain:+.0%}' for gain in row)} at transfer {transfer:g}"
        for transfer, row in found.items()
    )
    conclude(
        'Narayanan et al., "Efficient Large-Scale Language Model Training", 2021',
        "bubble (p-1)/(v m) of the ideal time; 10% more throughput where batches are small",
        f"bubble {'exactly that' if exact else 'NOT that'} for v = 2, 4; with v = 2 and"
        f" {', '.join(map(str, MICROBATCHES))} microbatches {shown}",
        f"simulated, {DEVICES} devices, F = I = W = 1",
        Figure(
            f"gain over 1F1B at {MICROBATCHES[0]} microbatches, the slowest transfer",
            found[TRANSFERS[-1]][0], 0.1, "%", nothing=0.0, how="simulated",
        ),
        holds={"bubble as the formula": exact},
    )  # fmt: skip


if __name__ == "__main__":
    main()
