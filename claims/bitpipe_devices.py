"""Claim: BitPipe is 1.05 to 1.28 times as fast as other synchronous pipelines.

Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
Training", 2024, beside 1F1B, its interleaved form and Chimera, in as many microbatches as devices
(as the authors run BERT) and in twice as many (GPT). On emulated devices: eight real workers, the
product's schedules, engine and messages; a pass waits as long as a device would take
(claims/paced.py), and a sum over the two copies of a stage as long beside its forward pass as by
claims/bitpipe.py's rates.
"""

from __future__ import annotations

import paced
from bitpipe import CASES, DEVICE, merge_of
from hanayo import MODELS
from verdict import Figure, conclude

WORKERS, CHUNKS, PASS = 8, 2, 0.2  # seconds of a worker's forward pass
OTHERS = ("1f1b", f"interleaved:{CHUNKS}", "chimera")


def main() -> None:
    gains, same = dict[str, dict[str, float]](), True
    for case, (rows, count) in CASES.items():
        merge = merge_of(rows * MODELS[case].tokens)
        model = PASS * (1 + paced.BACK) * WORKERS * count
        depth = WORKERS * CHUNKS
        names = (f"bitpipe:{CHUNKS}", *OTHERS)
        ours, *others = paced.take(
            [paced.Way(n, WORKERS, count, depth, model, merge) for n in names]
        )
        pairs = zip(OTHERS, others, strict=True)
        gains[case] = {name: one.seconds / ours.seconds for name, one in pairs}
        same &= all(abs(one.loss / ours.loss - 1) < 1e-10 for one in others)
    shown = "; ".join(
        f"{case}, m = {CASES[case][1] // WORKERS}p: "
        + ", ".join(f"{gain:.3f}x {name}" for name, gain in each.items())
        for case, each in gains.items()
    )
    conclude(
        'Wu et al., "BitPipe", 2024',
        "1.05x to 1.28x the throughput of other synchronous pipelines",
        shown,
        f"{paced.EMULATED}; {WORKERS} of them, two chunks a direction, {PASS} s a forward pass"
        f" of a worker, sums by {DEVICE}'s rates",
        *(
            Figure(
                f"over the best of the others, {case}", min(each.values()), 1.05,
                how="emulated devices", timed=True,
            )
            for case, each in gains.items()
        ),
        Figure(
            "over the slowest of the others, the most",
            max(max(each.values()) for each in gains.values()), 1.28,
            how="emulated devices", timed=True,
        ),
        holds={"the same loss": same},
    )  # fmt: skip


if __name__ == "__main__":
    main()
