"""Claim: waves are up to 30.4% faster than Chimera, without a second copy of the model.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", 2023. On emulated devices: eight real workers, the product's schedules, engine and
messages, as many microbatches as workers, every number of waves that 64 layers can have; a pass
waits as long as a device would take (claims/paced.py). A forward pass is so slow that a message of
this machine is small beside it, as over the links of the paper's clusters. Chimera's sums over the
two copies of a stage take nothing but this machine's time, which is to its good.
"""

from __future__ import annotations

import paced
from verdict import Figure, conclude

WORKERS, WAVES, LAYERS, PASS = 8, (1, 2, 4), 64, 0.4  # seconds of a worker's forward pass


def main() -> None:
    model = PASS * (1 + paced.BACK) * WORKERS * WORKERS
    names = ("chimera", *(f"hanayo:{waves}" for waves in WAVES))
    theirs, *ours = paced.take([paced.Way(name, WORKERS, WORKERS, LAYERS, model) for name in names])
    gains = {n: theirs.seconds / one.seconds - 1 for n, one in zip(WAVES, ours, strict=True)}
    shown = ", ".join(f"{gain:+.1%} with {n}" for n, gain in gains.items())
    conclude(
        'Liu et al., "Hanayo", 2023',
        "up to 30.4% more throughput than the state of the art (Chimera), no replicas",
        f"waves over Chimera: {shown}",
        f"{paced.EMULATED}; {WORKERS} of them and as many microbatches, {LAYERS} stages of a model,"
        f" {PASS} s a forward pass of a worker",
        Figure(
            "gain over Chimera, best number of waves", max(gains.values()), 0.304, "%", nothing=0.0,
            how="emulated devices", timed=True,
        ),
        holds={"the same loss": all(abs(one.loss / theirs.loss - 1) < 1e-10 for one in ours)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
