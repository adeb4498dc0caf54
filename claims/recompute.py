"""Claim: keeping block inputs alone costs one more forward and frees most of the activations.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016: memory of a deep network's
activations falls to that of its checkpoints, for one extra forward pass. Predicted by rehearsal,
whose figures the tests hold against measured ones.
"""

from __future__ import annotations

from dataclasses import replace

from verdict import Figure, conclude

from outsize.hardware.probe import probe
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.optim import AdamW
from outsize.plan import Precision
from outsize.search import PlanRequest, choose

ROWS, SEQUENCE = 8, 512


def main() -> None:
    config = parse(PRESETS["25m"])
    base = PlanRequest(
        ROWS, SEQUENCE, Precision.named("float32"), AdamW(), microbatch_rows=ROWS, recompute=()
    )
    hardware = probe()
    kept, again = (choose(config, replace(base, recompute=r), hardware) for r in ((), ("block",)))
    activations = [f.peak - sum(f.static.values()) for f in (kept, again)]
    memory, flops = activations[0] / activations[1], again.flops / kept.flops
    conclude(
        'Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016',
        "activations of checkpoints and one block instead of all; operations 4/3 at most",
        f"{memory:.1f}x fewer bytes beside the static ones, {flops:.2f}x the operations",
        f"25m preset, {len(config.layers)} blocks, {ROWS} x {SEQUENCE} tokens, float32, rehearsed",
        Figure(
            "fewer bytes of activations",
            memory,
            48 / 7,
            how="simulated",
            other=f"{len(config.layers)} blocks, not 1,000 layers",
        ),
        Figure("operations", flops, 1.3, nothing=2.0, less=True, how="simulated"),
    )


if __name__ == "__main__":
    main()
