"""Claim: cutting a batch into 32 microbatches makes two partitions 1.21 times as fast for a network
with batch normalisation and 1.8 times for a transformer.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018,
table of normalised throughput: two partitions with 32 microbatches over the same with one, of
AmoebaNet and of a transformer. Run: `outsize.prepare(mesh="pipeline=2", pipeline="gpipe")` under
torchrun, two workers with a core each, blocks computed again as there. Each microbatch is
normalised by its own statistics, as the authors have it: those of a whole batch would make a
barrier of every layer (outsize/train/prepared/statistics.py).
"""

from __future__ import annotations

import by_time
from verdict import Figure, conclude

MICROBATCHES, TURNS = 32, 2
PAPER = {"convolutions": 1.21, "transformer": 1.8}


def work() -> dict[str, list[float]]:
    """By subject the least seconds of a step, with one microbatch and with many."""
    ways = [
        {"microbatches": count, "pipeline": "gpipe", "recompute": ("block",)}
        for count in (1, MICROBATCHES)
    ]
    return by_time.least(dict.fromkeys(PAPER, ways), TURNS)


def main() -> None:
    if by_time.is_worker():
        by_time.tell(work())
        return
    found = by_time.run(__file__)
    gains = {name: one / many for name, (one, many) in found.items()}
    conclude(
        'Huang et al., "GPipe", 2018',
        "two partitions, 32 microbatches over one: 1.21x AmoebaNet, 1.8x a transformer",
        ", ".join(
            f"{name} {gain:.2f}x ({found[name][0] * 1e3:.0f} to {found[name][1] * 1e3:.0f} ms)"
            for name, gain in gains.items()
        ),
        f"run: torchrun, {by_time.WORKERS} workers with a core each, {by_time.ROWS} rows a step,"
        " convolutions with batch normalisation (0.3M parameters) and a transformer (6.6M),"
        f" float32, best of {TURNS} runs in turn",
        *(
            Figure(
                f"throughput of {name}, {MICROBATCHES} microbatches over one", gain, PAPER[name],
                timed=True, other="of small models on a processor",
            )
            for name, gain in gains.items()
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
