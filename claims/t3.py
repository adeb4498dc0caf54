"""Claim: sums overlapped with the products that make them speed up sublayers by 30% (at most 47%).

Pati et al., "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives", 2024, in hardware; here a product goes in chunks of tokens, and a thread sums a chunk
while the next is multiplied. Measured: products with their sums and gathers, forward and back, over
an emulated link of 1 Gbit/s. Simulated: sublayers of T-NLG on accelerators like the paper's, by the
event simulator: 100 TFLOP/s of half precision, 75 GB/s each way. As in the paper the scattered
sum runs under the product and the gather behind it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from slow_links import Link, Slow, minima, workers
from verdict import Figure, conclude

from outsize.collectives import Collective, World, along
from outsize.kernels import product
from outsize.parallel.sums import all_gather, reduce_scatter
from outsize.parallel.tensor.overlap import Arrivals, Overlap
from outsize.parallel.tensor.overlap_products import chunks_of, scattered_rows, summed_rows
from outsize.simulate.events import Node, run

TOKENS, INNER, HIDDEN, CHUNKS, TIMES = 1024, 2048, 1024, 4, 10
CLAIMED = 1.30
FLOPS, RATE = 100e12, 75e9  # of the simulated accelerators; and bytes a second each way


def sublayers(axis: Collective, way: Overlap) -> dict[str, tuple[Callable[[], torch.Tensor], ...]]:
    """Each product with its sum or gather: one after the other, and overlapped."""
    generator = torch.Generator().manual_seed(axis.rank)
    x_TI, row, column = (
        torch.randn(shape, generator=generator)
        for shape in ((TOKENS, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
    )
    x_tD = torch.randn((TOKENS // axis.size, HIDDEN), generator=generator)
    whole, parts = chunks_of(TOKENS, CHUNKS, 1), chunks_of(TOKENS, CHUNKS, axis.size)

    def gathered(chunked: bool) -> torch.Tensor:
        if not chunked:
            return product.linear(all_gather(x_tD, axis, 0, TOKENS), column, None)
        run = Arrivals(way, ("all_gather", "reduce_scatter"), TOKENS)
        return run.multiplied(run.gather(x_tD), column, None)

    def backward(chunked: bool) -> torch.Tensor:
        """The sum of an input's gradient, and a weight's gradient."""
        total, run = torch.zeros(HIDDEN, INNER), Arrivals(way, ("none", "all_reduce"), TOKENS)
        gx_TI = x_TI.clone()
        if chunked:
            run.defer(lambda weight, compute: compute(total), row, add)
            return torch.cat((run.back(gx_TI).flatten(), total.flatten()))
        add(total)
        return torch.cat((axis.all_reduce(gx_TI).flatten(), total.flatten()))

    def add(grad: torch.Tensor) -> None:
        product.add_product(grad, gy_TD.t(), x_TI)

    gy_TD = torch.randn((TOKENS, HIDDEN), generator=generator)
    return {
        "product, sum": (
            lambda: axis.all_reduce(product.linear(x_TI, row, None)),
            lambda: summed_rows(way, whole, x_TI, row, None),
        ),
        "product, scattered sum": (
            lambda: reduce_scatter(product.linear(x_TI, row, None), axis, 0, TOKENS),
            lambda: scattered_rows(way, parts, x_TI, row, None),
        ),
        "gather, product": (partial(gathered, False), partial(gathered, True)),
        "back: sum, weight's gradient": (partial(backward, False), partial(backward, True)),
    }


@torch.no_grad()
def measured(world: World) -> tuple[dict[str, float], float]:
    """Seconds of each sublayer, and the largest difference of their numbers."""
    link = Link()
    axis = Slow(along(world, "tensor"), link)
    way = Overlap(Slow(along(world, "tensor", "beside"), link), CHUNKS)
    ways, worst = {}, 0.0
    for name, (plain, chunked) in sublayers(axis, way).items():
        a, b = plain(), chunked()
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
        ways[f"{name} plain"], ways[f"{name} chunked"] = plain, chunked
    return minima(world, ways, TIMES), worst


def simulated(workers_: int, inner: int, hidden: int = 4256, tokens: int = 8192) -> float:
    """How much quicker a sublayer of T-NLG is in chunks: (tokens, inner / n) times (inner / n,
    hidden), the scattered sum, the gather."""

    def seconds(chunks: int) -> float:
        product = 2 * tokens * inner / workers_ * hidden / FLOPS / chunks
        moved = tokens * hidden * 2 * (workers_ - 1) / workers_ / RATE
        nodes = [Node(0, "compute", product) for _ in range(chunks)]
        nodes += [Node(0, "network", moved / chunks, (i,)) for i in range(chunks)]
        nodes.append(Node(0, "network", moved))
        return run(nodes).makespan

    return seconds(1) / seconds(32)


def main() -> None:
    found = workers(measured, 2)
    worst = max(difference for _, difference in found)
    names = [name.removesuffix(" plain") for name in found[0][0] if name.endswith(" plain")]
    gains = []
    for name in names:
        before, after = (max(one[f"{name} {x}"] for one, _ in found) for x in ("plain", "chunked"))
        gains.append(before / after)
        print(f"    {name}: {before * 1e3:.0f} to {after * 1e3:.0f} ms, {gains[-1]:.2f}x")
    layers = {"attention's output": 4256, "feed-forward's output": 4 * 4256}
    paper = [simulated(n, inner) for n in (8, 16) for inner in layers.values()]
    mean, theirs = (math.prod(x) ** (1 / len(x)) for x in (gains, paper))
    conclude(
        'Pati et al., "T3", 2024',
        "sublayers 30% quicker (geometric mean), at most 47%",
        f"{mean:.2f}x (geometric mean; {', '.join(f'{g:.2f}' for g in gains)}), relative"
        f" difference of the numbers {worst:.0e}; simulated for the paper's accelerators"
        f" {theirs:.2f}x ({', '.join(f'{g:.2f}' for g in paper)})",
        f"products of {TOKENS} tokens, {INNER} x {HIDDEN}, {CHUNKS} chunks, 2 workers of one"
        " thread, link of 1 Gbit/s and 0.1 ms EMULATED (real sums, then sleep), float32;"
        " T-NLG on 8 and 16 accelerators SIMULATED",
        Figure(
            "sublayers quicker, mean",
            mean,
            CLAIMED,
            how="emulated links",
            timed=True,
            other="a link of 1 Gbit/s",
        ),
        Figure(
            "sublayers quicker, mean, on the paper's hardware", theirs, CLAIMED, how="simulated"
        ),
        Figure(
            "sublayers quicker, the most, on the paper's hardware",
            max(paper),
            1.47,
            how="simulated",
        ),
        holds={"the same numbers at 1e-4": worst < 1e-4},
    )


if __name__ == "__main__":
    main()
