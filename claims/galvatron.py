"""Claim: strategies chosen block by block beat every pure strategy at the same memory.

Liu et al., "Galvatron: Automatic Distributed Training for Large Transformer Models", 2025: data,
sharded data, tensor and pipeline parallelism and recompute, chosen for every layer. Here the mesh,
the sharding and the schedule are of all blocks, and recompute is of a run of each stage's blocks;
degrees by run are missing. On eight devices whose memory is held to a budget: the product's plan
against its own plans where one axis alone may be used, with nothing or everything recomputed, and
against its best plan without recompute by run.
"""

from __future__ import annotations

from collections.abc import Mapping

from verdict import Figure, conclude

from outsize.errors import OutsizeError
from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked, Conditions, conditions
from outsize.foresight.planning.choose import Planned, choose
from outsize.hardware import parse_spec

MODELS, BUDGETS = ("llama-1.1b", "llama2-7b"), (8, 12, 16, 20)  # GiB of a device
# The nearest in the catalogue to the authors' eight cards of 24 GB over PCIe.
CLUSTER, SEQUENCE, ROWS = "8xRTX-4090", 2048, 64
NOT_BY_RUN = "recompute!=part"
PURE: Mapping[str, str] = {
    "data": "tensor=1,pipeline=1,context=1,zero=0",
    "sharded data": "tensor=1,pipeline=1,context=1,zero=3",
    "tensor": "tensor=8,pipeline=1,context=1",
    "pipeline": "tensor=1,pipeline=8,context=1",
}


def planned(model: str, budget: int, *required: str) -> Planned | None:
    asked = Asked(
        SEQUENCE, ROWS, conditions=Conditions(conditions(required, "--require")),
        memory=budget << 30, seconds=60,
    )  # fmt: skip
    try:
        plans = choose(shape_of(model), asked, parse_spec(CLUSTER), 1).plans
    except OutsizeError:  # nothing divides
        return None
    return plans[0] if plans else None


def said(plan: Planned) -> str:
    lay = plan.layout
    part = f"{lay.whole} blocks" if lay.whole else lay.recompute
    sharded = max(lay.states, lay.shards)
    return f"{lay.data} x tensor {lay.tensor} x pipeline {lay.pipeline}, {sharded} shards, {part}"


def main() -> None:
    over_pure, over_whole, runs, fits = [], [], 0, True
    for model in MODELS:
        for budget in BUDGETS:
            best = planned(model, budget)
            if best is None:
                print(f"  (simulated) {model} in {budget} GiB: nothing fits")
                continue
            pure = {
                name: plan.seconds
                for name, asked in PURE.items()
                if (plan := planned(model, budget, asked, NOT_BY_RUN)) is not None
            }
            whole = planned(model, budget, NOT_BY_RUN)
            runs += best.layout.whole > 0
            fits = fits and best.memory.process <= budget << 30
            if pure:
                over_pure.append(min(pure.values()) / best.seconds)
            if whole is not None:
                over_whole.append(whole.seconds / best.seconds)
            times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in pure.items())
            print(
                f"  (simulated) {model} in {budget} GiB: {best.seconds:.2f} s ({said(best)});"
                f" {times or 'no pure strategy fits'}"
            )
    ahead = sum(gain > 1 for gain in over_pure)
    conclude(
        'Liu et al., "Galvatron", 2025',
        "strategies selected layer by layer raise throughput over static ones",
        f"(simulated) {min(over_pure):.3f} to {max(over_pure):.3f} times the best pure strategy"
        f" that fits, ahead in {ahead} of {len(over_pure)}; recompute of a run of blocks in {runs}"
        f" plans, up to {max(over_whole):.3f} times none or all of it",
        f"{CLUSTER}, {', '.join(MODELS)}, budgets of {', '.join(map(str, BUDGETS))} GiB,"
        f" {ROWS} rows of {SEQUENCE} tokens; degrees of parallelism by run are missing",
        Figure(
            "budgets in which it is ahead of every pure strategy", ahead, len(over_pure), "", 0.0,
            how="simulated", other="no degrees by run",
        ),
        Figure("gain of recompute by run, most", max(over_whole), None, how="simulated"),
        holds={"plans keep within their budgets": fits},
    )  # fmt: skip


if __name__ == "__main__":
    main()
