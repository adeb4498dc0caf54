"""Claim: gradients summed in buckets behind each stage's backward pass cost little time, by a link.

Li et al., "PyTorch Distributed", 2020. Two workers whose sums take as long as over a link that is
slow on purpose (they wait), with the sums where the schedule has them and all of them behind the
backward pass: how much of them is hidden, how much a step gains, and that the weights are the same
bit for bit. The paper's own machines are in claims/data_parallel.py.
"""

from __future__ import annotations

import sharded
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.plan import Precision, Sharding

CONFIG = sharded.llama(256, 6, 4, 1024, 688)
RATE = 70e6  # bytes a second of the link
GAIN = 0.35  # of a step with BERT on 32 devices, by overlap


def real() -> tuple[bool, float, float]:
    """Whether weights are equal; the share of the sums that is hidden; what a step gains."""
    plan = sharded.plan_of(
        CONFIG, Mesh(2), Sharding(), 4, 128, precision=Precision.named("float32")
    )
    ways = (None, sharded.sums_last)
    works = [sharded.Steps(CONFIG, plan, 5, RATE, way) for way in ways]
    overlapped, last = sharded.run(*works)
    same = overlapped[0].apart(last[0]) == 0 and overlapped[1].apart(overlapped[0]) == 0
    seconds, share = sharded.hidden(overlapped[0].trace)
    gain = last[0].seconds / overlapped[0].seconds - 1
    print(
        f"  2 real workers, link of {RATE / 1e6:.0f} MB/s: sums take {seconds:.2f} s, {share:.0%}"
        f" of it under the passes (behind them {sharded.hidden(last[0].trace)[1]:.0%}); a step"
        f" {last[0].seconds:.2f} to {overlapped[0].seconds:.2f} s ({gain:+.0%}); equal weights:"
        f" {same}"
    )
    return same, share, gain


def main() -> None:
    same, share, gain = real()
    conclude(
        'Li et al., "PyTorch Distributed", 2020',
        "overlap makes steps of BERT 35% faster on 32 devices",
        f"{share:.0%} of the sums hidden, {gain:+.0%} by overlap, equal weights",
        f"Llama of {len(CONFIG.layers)} layers, hidden 256, float32, 1 thread a worker, sums that"
        f" wait for a link of {RATE / 1e6:.0f} MB/s",
        Figure(
            "gain by overlap over a slow link",
            gain,
            GAIN,
            "%",
            nothing=0.0,
            how="emulated links",
            timed=True,
            other=f"2 workers and a link of {RATE / 1e6:.0f} MB/s",
        ),
        holds={"weights equal bit for bit": same},
    )


if __name__ == "__main__":
    main()
