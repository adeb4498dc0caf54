"""Claim: states cut by levels of the network keep most bytes off its slowest level.

"Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", 2025: weights
over the 2 chips of a board, gradients over the 8 of a node, optimizer states over all. Beside it
the two-level cases: hybrid sharding (all states within a node), ZeRO++'s second copy of parameters
in every node (Wang et al., 2023), and plain ZeRO-3. Real: 8 workers that take themselves to be on 2
hosts, bytes counted by level against those predicted, weights against ZeRO-3's. Simulated: a GPT of
20G parameters on Frontier's nodes (200 GB/s between the chips of a board, 50 within a node, 12.5 or
less of each chip to other nodes), with the papers' messages of 8 and 4 bits on both sides; ZeRO-3
has whole ones.
"""

from __future__ import annotations

from collections.abc import Callable

import sharded
from verdict import Figure, conclude

from outsize.collectives import Mesh
from outsize.hardware import Hardware, catalogue
from outsize.memory import format_bytes
from outsize.plan import Precision, Sharding, zero
from outsize.simulate import Forecast

HOSTS = ("a",) * 4 + ("b",) * 4
CONFIG = sharded.SMALL
REAL = {
    "ZeRO-3": zero(3, 8),
    "ZeRO++, parameters in a host": Sharding(4, 8, 8),
    "three levels": Sharding(2, 4, 8),
    "hybrid": Sharding(4, 4, 4),
}
GPT = sharded.llama(6144, 44, 64, 50257, 16384)  # 20G parameters
MESSAGES = "quantised-messages"
MEMORY, REACHED, WORKERS = 64e9, 0.4, 384
CLAIMED, SCALED = 1.71, 0.94  # speed over ZeRO++, and of linear
OUTSIDE = {"gather_bits": 32, "collect_bits": 8}  # parameters travel whole inside nodes
FRONTIER: dict[str, tuple[Callable[[int], Sharding], tuple[str, ...], dict[str, int]]] = {
    "ZeRO-3": (lambda n: zero(3, n), (), {}),
    "ZeRO++": (lambda n: Sharding(8, n, n), (MESSAGES,), {}),
    "three levels": (lambda n: Sharding(2, 8, n), (MESSAGES,), {}),
    "hybrid": (lambda n: Sharding(8, 8, 8), (MESSAGES,), {}),
    "ZeRO++, whole in nodes": (lambda n: Sharding(8, n, n), (MESSAGES,), OUTSIDE),
    "three levels, whole in nodes": (lambda n: Sharding(2, 8, n), (MESSAGES,), OUTSIDE),
    "three levels, whole messages": (lambda n: Sharding(2, 8, n), (), {}),
}
NETWORKS = (12.5, 3.1, 1.5)  # GB/s of a chip: all of its share of the node's cards, and less


def real() -> tuple[bool, dict[str, float]]:
    """Whether weights and bytes are right; bytes from the other host by worker and step."""
    plans = [
        sharded.plan_of(CONFIG, Mesh(8), shards, 2, 32, 2, Precision.named("float64"))
        for shards in REAL.values()
    ]
    found = sharded.run(*(sharded.Steps(CONFIG, plan, 2) for plan in plans), hosts=HOSTS)
    forecaster, good, across = sharded.Predicted(CONFIG, Precision.named("float64")), True, {}
    for (name, plan), every in zip(zip(REAL, plans, strict=True), found, strict=True):
        across[name] = sum(ran.far for ran in every) / 8
        had = sum(ran.bytes for ran in every) / 8
        made = forecaster.of(plan, catalogue("MI250X-GCD", 4))
        apart = max(ran.apart(found[0][0]) for ran in every)
        print(
            f"  8 real workers on 2 hosts, {name}: a worker has {had / 1e6:.3f} MB a step from"
            f" others, {across[name] / 1e6:.3f} of them from the other host (predicted"
            f" {sharded.foretold(made) / 1e6:.3f}, {sharded.far(made) / 1e6:.3f}); weights differ"
            f" by {apart:.0e}"
        )
        right = (had / sharded.foretold(made), across[name] / sharded.far(made))
        good &= apart < 1e-10 and all(abs(ratio - 1) < 0.01 for ratio in right)
    return good, across


def frontier(network: float) -> Hardware:
    """Nodes of 4 boards of 2 chips. network: GB/s of a chip to other nodes."""
    return sharded.cluster(
        "MI250X-GCD", 8, REACHED, links=((2, 200), (8, 50)), network=network, wait=20e-6
    )


def simulated() -> tuple[dict[tuple[str, float], Forecast], float]:
    """Each way on 384 chips over networks of several rates; what of the speed of 64 chips three
    levels keep."""
    forecaster, made = sharded.Predicted(GPT, sharded.MIXED), {}

    def of(name: str, workers: int, network: float) -> Forecast:
        shards, approximate, bits = FRONTIER[name]
        plan = sharded.plan_of(
            GPT, Mesh(workers), shards(workers), 2, 2048, 2, sharded.MIXED, ("block",),
            approximate=approximate, **bits,
        )  # fmt: skip
        return forecaster.of(plan, frontier(network))

    for name in FRONTIER:
        for network in NETWORKS:
            made[name, network] = of(name, WORKERS, network)
        one = made[name, NETWORKS[0]]
        seconds = ", ".join(f"{made[name, network].seconds:.2f}" for network in NETWORKS)
        fits = "" if one.peak <= MEMORY else ", which does NOT fit"
        print(
            f"  (simulated) {WORKERS} chips, {name}: {seconds} s a step at {NETWORKS} GB/s;"
            f" {format_bytes(round(sharded.foretold(one)))} from others,"
            f" {format_bytes(round(sharded.far(one)))} from other nodes; peak"
            f" {format_bytes(one.peak)}{fits}"
        )
    nominal = NETWORKS[0]
    kept = of("three levels", 64, nominal).seconds / made["three levels", nominal].seconds
    return made, kept


def main() -> None:
    good, across = real()
    made, kept = simulated()

    def gain(over: str, network: float) -> float:
        return made[over, network].seconds / made["three levels", network].seconds

    def whole(network: float) -> float:
        both = (f"{name}, whole in nodes" for name in ("ZeRO++", "three levels"))
        other, ours = (made[name, network].seconds for name in both)
        return other / ours

    fewer = across["ZeRO-3"] / across["three levels"]
    nominal, slowest = NETWORKS[0], NETWORKS[-1]
    plain, copied = "ZeRO-3", "ZeRO++"
    conclude(
        '"Scaling LLM Training on Frontier with Low-Bandwidth Partitioning", 2025 (and ZeRO++)',
        "levels keep bytes off the slowest links; 1.71 times ZeRO++'s speed on 384 chips, scaling"
        " efficiency 0.94",
        f"real: {fewer:.1f} times fewer bytes from the other host than ZeRO-3, as predicted, one"
        f" set of weights; (simulated) times the speed of ZeRO++ and of ZeRO-3"
        f" {gain(copied, nominal):.2f} and {gain(plain, nominal):.2f} at {nominal} GB/s, where"
        f" passes hide nearly all, {gain(copied, slowest):.2f} and {gain(plain, slowest):.2f} at"
        f" {slowest}; over ZeRO++ where both gather whole parameters inside nodes"
        f" {whole(nominal):.2f} and {whole(slowest):.2f}; {kept:.2f} of linear from 64 chips",
        f"real: Llama of {len(CONFIG.layers)} layers, float64, 2 microbatches; simulated: hidden"
        f" 6144, 44 layers, 2 rows of 2,048 one by one, blocks recomputed, {REACHED:.0%} of peak,"
        " messages of 8 and 4 bits on both sides, of 16 for ZeRO-3, 20 us a message;"
        " updated parameters are collected at the end of a step, which nothing hides",
        Figure(
            "speed over ZeRO++",
            gain(copied, nominal),
            CLAIMED,
            how="simulated",
        ),
        Figure(
            "speed kept from 64 chips", kept, SCALED, "%", nothing=64 / WORKERS, how="simulated"
        ),
        holds={"weights and bytes as predicted": good},
    )


if __name__ == "__main__":
    main()
