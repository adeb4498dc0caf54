"""Claim: partial pipelines take up to 55% less time a step than full ones.

Blagoev et al., "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in
Heterogeneous Networks", 2025. Simulated here on equal workers and links, where what is saved is
work and bubble; the paper's largest figure comes from networks with slow links. What skipping does
to the model's quality is what skippipe_trained.py runs.
"""

from __future__ import annotations

from verdict import Figure, conclude

from outsize.schedule.pipelines import Costs, one_f_one_b, skip_pipe
from outsize.simulate.coarse import Times, play

DEVICES, TRANSFER = 8, 0.1


def main() -> None:
    times, costs = Times(1, 1, 1, TRANSFER), Costs(1, 1, 1, TRANSFER)
    saved = {}
    for microbatches in (8, 16):
        full = play(one_f_one_b(DEVICES, microbatches), times).run.makespan
        for skip in (0.25, 0.5):
            made = skip_pipe(DEVICES, microbatches, skip, costs)
            saved[microbatches, skip] = 1 - play(made, times).run.makespan / full
    conclude(
        'Blagoev et al., "SkipPipe", 2025',
        "up to 55% less time a step than the full pipeline (networks of unequal links)",
        ", ".join(f"{s:.0%} less at m = {m}, skip {k:.0%}" for (m, k), s in saved.items()),
        f"simulated, {DEVICES} equal workers and links, F = I = W = 1, transfer {TRANSFER}",
        Figure(
            "less time a step",
            max(saved.values()),
            0.55,
            "%",
            nothing=0.0,
            how="simulated",
            other="equal workers and links",
        ),
    )


if __name__ == "__main__":
    main()
