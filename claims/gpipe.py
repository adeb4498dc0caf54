"""Claim: GPipe's bubble is (p-1)/(m+p-1), and speed-up is almost linear with enough microbatches.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018:
the bubble is negligible when there are at least four microbatches a partition. Simulated: equal
stages without transfers.
"""

from __future__ import annotations

from verdict import Figure, conclude

from outsize.schedule.pipelines import gpipe
from outsize.simulate.coarse import Times, play


def main() -> None:
    exact, speedups = True, {}
    for devices in (2, 4, 8):
        for microbatches in (devices, 4 * devices):
            run = play(gpipe(devices, microbatches), Times(1, 1, 1)).run
            wanted = (devices - 1) / (microbatches + devices - 1)
            exact &= abs(max(run.idle_in_makespan) / run.makespan - wanted) < 1e-9
            # A device alone does every device's work.
            speedups[devices, microbatches] = sum(run.busy) / run.makespan
    scaled = {p: speedups[p, 4 * p] for p in (2, 4, 8)}
    conclude(
        'Huang et al., "GPipe", 2018',
        "idle (p-1)/(m+p-1) of the step; almost linear speed-up from m = 4p",
        f"idle {'exactly that' if exact else 'NOT that'}; speed-up "
        + ", ".join(f"{value:.1f} on {p}" for p, value in scaled.items()),
        "simulated, equal stages, F = I = W = 1, no transfers",
        *(
            Figure(
                f"speed-up on {p}",
                round(scaled[p], 9),
                round(4 * p * p / (5 * p - 1), 9),
                how="simulated",
                nothing=1.0,
            )
            for p in scaled
        ),
        holds={"idle as the formula": exact},
    )


if __name__ == "__main__":
    main()
