"""Claim: two, four and eight partitions with 32 microbatches train a transformer 1.8, 3.4 and 6.3
times as fast as two with one.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018,
its table of normalised throughput, the transformer, whose stages are equal. On emulated devices: as
many real workers as partitions, the product's schedule `gpipe`, engine and messages; a pass waits
as long as its part of the model and of the rows takes (claims/paced.py). The order by formula is
claims/gpipe.py's, the time of small models on two cores claims/gpipe_timed.py's.
"""

from __future__ import annotations

import paced
from verdict import Figure, conclude

PAPER, MICROBATCHES, DEPTH = {2: 1.8, 4: 3.4, 8: 6.3}, 32, 8
WHOLE = 30.0  # seconds of a step of one device


def main() -> None:
    taken = dict[int, paced.Taken]()
    (whole,) = paced.take([paced.Way("gpipe", 2, 1, DEPTH, WHOLE)])
    for workers in PAPER:
        (taken[workers],) = paced.take([paced.Way("gpipe", workers, MICROBATCHES, DEPTH, WHOLE)])
    found = {p: whole.seconds / one.seconds for p, one in taken.items()}
    ideal = {p: MICROBATCHES * p / (MICROBATCHES + p - 1) for p in PAPER}
    shown = ", ".join(f"{found[p]:.2f}x on {p} ({ideal[p]:.2f} at most)" for p in PAPER)
    conclude(
        'Huang et al., "GPipe", 2018',
        "a transformer in 32 microbatches on 2, 4, 8 partitions: 1.8, 3.4, 6.3 times the throughput"
        " of 2 with one",
        shown,
        f"{paced.EMULATED}; {WHOLE:.0f} s a step of one device",
        *(
            Figure(
                f"throughput on {p}, {MICROBATCHES} microbatches", found[p], PAPER[p],
                how="emulated devices", timed=True,
            )
            for p in PAPER
        ),
        holds={
            "the same loss on any number of workers": all(
                abs(one.loss / taken[2].loss - 1) < 1e-10 for one in taken.values()
            )
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
