"""Claim: clusters with unlike network cards train almost as fast as one with the same fast cards.

Yang et al., "Holmes", 2023: machines with InfiniBand and machines with RoCE, joined by Ethernet;
groups that sum gradients lie among machines with the same cards, stages of the pipeline go over the
Ethernet. Nothing here knows of cards: the product is given rates between machines, numbered by
turns, and chooses layout and order. Its plan is priced beside its own plans where all have
InfiniBand, all RoCE and all Ethernet.
"""

from __future__ import annotations

from dataclasses import replace

from verdict import Figure, conclude

from outsize.foresight.named import shape_of
from outsize.foresight.planning.asked import Asked
from outsize.foresight.planning.choose import Planned, choose
from outsize.hardware import parse_spec

MODELS = ("llama2-7b", "llama2-13b", "llama2-70b")
MACHINES, EACH, ROWS, SEQUENCE = 8, 8, 512, 2048
# B/s of a machine, declared and nobody's measurement: four adapters of 200 Gb/s, four of 100 Gb/s,
# one of 25 Gb/s.
INFINIBAND, ROCE, ETHERNET = 100e9, 50e9, 3.125e9
Rates = tuple[tuple[float, ...], ...]


def rates(kinds: tuple[float, ...]) -> Rates:
    """Of one device of each machine; what two kinds have in common is Ethernet."""
    return tuple(
        tuple((one if one == other else ETHERNET) / EACH for other in kinds) for one in kinds
    )


def planned(model: str, between: Rates) -> Planned:
    cluster = replace(parse_spec(f"{MACHINES} x {EACH} A100-SXM-80"), rates=between)
    return choose(shape_of(model), Asked(SEQUENCE, ROWS, seconds=60), cluster, 1).plans[0]


def apart(plan: Planned) -> bool:
    """Whether all machines of each half of the order have the same cards."""
    half = [machine % 2 for machine in plan.machines[: MACHINES // 2]]
    return len(set(half)) == 1


def main() -> None:
    near, gains, halves = [], [], []
    for model in MODELS:
        mixed = planned(model, rates((INFINIBAND, ROCE) * (MACHINES // 2)))
        same = {
            name: planned(model, rates((rate,) * MACHINES))
            for name, rate in (("InfiniBand", INFINIBAND), ("RoCE", ROCE), ("Ethernet", ETHERNET))
        }
        lay = mixed.layout
        print(
            f"  (simulated) {model}: {mixed.seconds:.2f} s, {lay.data} x tensor {lay.tensor} x"
            f" pipeline {lay.pipeline} on machines {list(mixed.machines)}; in turn"
            f" {mixed.given:.2f} s; "
            + ", ".join(f"all {name} {plan.seconds:.2f} s" for name, plan in same.items())
        )
        near.append(same["RoCE"].seconds / mixed.seconds)
        gains.append(same["Ethernet"].seconds / mixed.seconds)
        halves.append(apart(mixed))
    conclude(
        'Yang et al., "Holmes", 2023',
        "close to clusters of one kind of fast card, significantly above pure Ethernet",
        f"(simulated) {min(near):.1%} to {max(near):.1%} of the speed with RoCE everywhere,"
        f" {min(gains):.2f} to {max(gains):.2f} times that of Ethernet everywhere; machines with"
        f" the same cards side by side in {sum(halves)} of {len(halves)} plans",
        f"{MACHINES} x {EACH} A100, half with InfiniBand and half with RoCE, joined by Ethernet;"
        f" {', '.join(MODELS)}, {ROWS} rows of {SEQUENCE} tokens; stages of equal blocks, which the"
        " paper cuts by speed; the abstract has no number",
        Figure("speed over RoCE everywhere, least", min(near), None, nothing=0.5, how="simulated"),
        Figure("speed over Ethernet everywhere, least", min(gains), None, how="simulated"),
        Figure("plans with like cards side by side", sum(halves), None, "", 0.0, how="simulated"),
    )


if __name__ == "__main__":
    main()
