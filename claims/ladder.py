"""Claim: a ladder of branches hides the sums of tensor parallelism: 30% quicker at 70B over 8 GPUs,
with next to no loss where the upper half of a trained model is converted and trained a little.

Zhang et al., "Ladder-Residual", 2025, and the authors' own account of it. Simulated: one token of
Llamas of its sizes over 8 H100, plain and as a ladder, of 1 to 64 rows. Sheets are the product's
catalogue, what is reached of them and the starts of kernels those of `outsize plan --serve`
(outsize/serve/described.py). A sum takes what the authors measured there: 38% of the time of a
token of 70B at 77.39 tokens a second; the catalogue's own, for which it is not judged, stands
beside. Run: losses of a small decoder, trained here on text, converted, trained on, and from
scratch. Whole models over slow links are in claims/ladder_links.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retraining import losses
from rewire import to_ladder
from simulated_layers import Layer, ladder, layer_of, plain
from slow_links import mean
from verdict import Figure, conclude

from outsize.foresight.sources import Roofline
from outsize.hardware import parse_spec
from outsize.serve.described import COMPUTED, KERNELS, STARTED, STREAMED

WORKERS = 8
SIZES = {  # layers, hidden, key and value features, inner features
    "1B": (16, 2048, 512, 8192),
    "3B": (28, 3072, 1024, 8192),
    "8B": (32, 4096, 1024, 14336),
    "34B": (48, 8192, 1024, 22016),
    "70B": (80, 8192, 1024, 28672),
}
TOKEN, SHARE = 1 / 77.39, 0.38  # seconds of a plain token of 70B, and how much of it are sums
# Times as quick: of sizes at 4 rows, of 70B by rows.
OF_SIZES = {"1B": 1.444, "3B": 1.515, "8B": 1.447, "34B": 1.348, "70B": 1.301}
OF_ROWS = {1: 1.308, 4: 1.282, 8: 1.256, 16: 1.190, 32: 1.184, 64: 1.155}
ROWS = 4
SCRATCH = 18.42 / 18.54  # perplexities at 1.2B after 100G tokens; 14.90 and 14.48 at 3.5B


def layer(size: str, rows: int, wait: float) -> Layer:
    """One layer of a model. wait: seconds of a sum beside its bytes."""
    layers, hidden, keys, inner = SIZES[size]
    weights = (2.0 * hidden * hidden + 2.0 * hidden * keys, 3.0 * hidden * inner)
    node = parse_spec("8 x H100-SXM").groups[0]
    device, rate = node.device, node.levels[0].bandwidth.value
    flops, memory = Roofline(device).peak("bf16") * COMPUTED, device.bandwidth.value * STREAMED
    found = layer_of(rows, hidden, weights, WORKERS, flops, memory, rate, wait, layers)
    starts = KERNELS * STARTED / 2
    return replace(found, attention=found.attention + starts, mlp=found.mlp + starts)


def gain(size: str, rows: int, wait: float) -> float:
    """How many times as quick a ladder's token is."""
    one = layer(size, rows, wait)
    return plain(one) / ladder(one)


def main() -> None:
    measured = SHARE * TOKEN / (2 * SIZES["70B"][0])
    own = parse_spec("8 x H100-SXM").groups[0].levels[0].latency.value
    sizes = {size: gain(size, ROWS, measured) for size in SIZES}
    rows = {count: gain("70B", count, measured) for count in OF_ROWS}
    alone = plain(layer("70B", 1, measured))
    for name, each in (*sizes.items(), *rows.items()):
        print(f"    {name}: {each:.3f}x, by its authors {({**OF_SIZES, **OF_ROWS})[name]}x")
    trained = losses(to_ladder, lambda m: to_ladder(m, 0))
    print(f"    {trained}")
    conclude(
        'Zhang et al., "Ladder-Residual", 2025',
        "30% quicker at 70B over 8 GPUs; the upper half converted as good as the original model"
        " after some training; as good as the plain model from scratch",
        f"70B {rows[1]:.2f}x, a plain token {alone * 1e3:.1f} ms of the authors'"
        f" {TOKEN * 1e3:.1f}; by rows {', '.join(f'{g:.2f}' for g in rows.values())}x, by sizes"
        f" {', '.join(f'{g:.2f}' for g in sizes.values())}x; with the catalogue's sums of"
        f" {own * 1e6:.0f} us 70B {gain('70B', 1, own):.2f}x; {trained}",
        f"SIMULATED 8 H100 of the catalogue, {STREAMED:.0%} of the memory's bandwidth,"
        f" {COMPUTED:.0%} of the peak, {KERNELS} kernels a layer of {STARTED * 1e6:.0f} us to"
        f" start, sums of {measured * 1e6:.1f} us that slow nothing beside them; losses: 6 layers,"
        " hidden 64, bytes of Python sources",
        Figure("speed of a token, 70B over 8", rows[1], OF_ROWS[1], how="simulated"),
        _mean("speed of a token, mean of the sizes", sizes, OF_SIZES),
        _mean("speed of a token, 70B, mean of the rows", rows, OF_ROWS),
        Figure(
            "perplexity from scratch over the plain model's",
            math.exp(trained.scratch - trained.plain),
            SCRATCH,
            nothing=math.exp(trained.at_once - trained.plain),
            less=True,
            other="6 layers of 64, not 1.2B parameters after 100G tokens",
        ),
        holds={
            "converted and trained on, loss within 1% of the plain model's": trained.after
            < 1.01 * trained.plain
        },
    )


def _mean(what: str, ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> Figure:
    return Figure(what, mean(list(ours.values())), mean(list(theirs.values())), how="simulated")


if __name__ == "__main__":
    main()
