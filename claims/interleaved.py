"""Claim: interleaving divides the pipeline's bubble by the chunks, for 10% more throughput.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021. Simulated: equal stages, a backward of two forwards, each transfer a fiftieth of a stage's
forward. The part of the claim about tensor and data parallelism is not shown here.
"""

from __future__ import annotations

from verdict import verdict

from outsize.schedule.pipelines import interleaved, one_f_one_b
from outsize.simulate.coarse import Times, play

DEVICES, TRANSFER = 8, 0.02


def main() -> None:
    exact, gains = True, []
    for microbatches in (8, 16, 32, 64):
        ideal = 3.0 * microbatches
        for chunks in (2, 4):
            bubble = play(interleaved(DEVICES, microbatches, chunks), Times(1, 1, 1)).run
            wanted = (DEVICES - 1) / (chunks * microbatches)
            exact &= abs(max(bubble.idle_in_makespan) / ideal - wanted) < 1e-9
        times = Times(1, 1, 1, TRANSFER)
        plain = play(one_f_one_b(DEVICES, microbatches), times).run.makespan
        gains.append(plain / play(interleaved(DEVICES, microbatches, 2), times).run.makespan - 1)
    verdict(
        'Narayanan et al., "Efficient Large-Scale Language Model Training", 2021',
        "bubble (p-1)/(v m) of the ideal time; 10% more throughput where batches are small",
        f"bubble {'exactly that' if exact else 'NOT that'} for v = 2, 4; with v = 2 "
        + ", ".join(f"{gain:+.0%}" for gain in gains)
        + " at 8, 16, 32, 64 microbatches",
        exact and gains[0] > 0.1 and gains[1] > 0.1,
        f"simulated, {DEVICES} devices, F = I = W = 1, transfer {TRANSFER}",
    )


if __name__ == "__main__":
    main()
