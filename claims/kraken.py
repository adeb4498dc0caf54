"""Claim: sub-layers that are summed once a layer, beside the next attention, give the first token
35.6% sooner, at the perplexity of a plain transformer.

Prabhakar et al., "Kraken: Inherently Parallel Transformers For Efficient Multi-Device Inference",
2024. Measured: a prompt over emulated links; the losses of a small decoder in two ways from
scratch, and, which the paper does not do, converted from a trained plain one. Simulated: prompts of
128 and 2048 tokens of models like GPT-3's over 4 and 8 A100 (190 TFLOP/s, 1.2 TB/s and 200 GB/s
reached, 20 us a sum), as many weights in both.
"""

from __future__ import annotations

import math
from typing import Any

from retraining import losses
from rewire import to_kraken
from simulated_layers import kraken, layer_of, plain
from slow_links import SETTING, Link, balance, cut, decoder, minima, prompt, workers
from verdict import Figure, conclude

from outsize.collectives import World
from outsize.decode.generate import direct

TIMES, CLAIMED = 5, 1.356
FITTED = "the link is fitted to the model"
SIZES = {"1.3B": (24, 2048), "6.7B": (32, 4096), "13B": (40, 5120), "65B": (80, 8192)}


def measured(world: World) -> tuple[dict[str, float], float]:
    """Seconds of a prompt through a plain model and through one of two ways."""
    model, other, link = decoder(), to_kraken(decoder(), 2), Link()
    cut(model, world, link, 0)
    cut(other, world, link, 1)
    ways: dict[str, Any] = {"plain": direct(model), "kraken": direct(other)}
    rate = balance(world, link, ways["plain"])
    return minima(world, {n: (lambda w=w: prompt(w)) for n, w in ways.items()}, TIMES), rate


def simulated(layers: int, hidden: int, tokens: int, workers_: int) -> float:
    """How much sooner the first token comes."""
    weights = (4.0 * hidden**2, 8.0 * hidden**2)
    layer = layer_of(tokens, hidden, weights, workers_, 190e12, 1.2e12, 200e9, 2e-5, layers)
    return plain(layer) / kraken(layer)


def main() -> None:
    found = workers(measured, 2)
    before, after = (max(one[name] for one, _ in found) for name in ("plain", "kraken"))
    theirs = [
        simulated(layers, hidden, tokens, n)
        for layers, hidden in SIZES.values()
        for tokens in (128, 2048)
        for n in (4, 8)
    ]
    mean = math.prod(theirs) ** (1 / len(theirs))
    trained = losses(lambda m: to_kraken(m, 2), lambda m: to_kraken(m, 2))
    print(f"    {trained}")
    conclude(
        'Prabhakar et al., "Kraken", 2024',
        "first token 35.6% sooner (mean), at a similar perplexity",
        f"{before / after:.2f}x ({before * 1e3:.0f} to {after * 1e3:.0f} ms); simulated"
        f" {min(theirs):.2f} to {max(theirs):.2f}x, mean {mean:.2f}x; {trained}",
        f"{SETTING} ({found[0][1] * 8e-6:.0f} Mbit/s); losses: two ways, 6 layers, hidden 64, bytes"
        " of Python sources; the paper's GPUs SIMULATED",
        Figure(
            "first token, sooner",
            before / after,
            CLAIMED,
            how="emulated links",
            timed=True,
            other=FITTED,
        ),
        Figure("first token, sooner, mean of the sizes", mean, CLAIMED, how="simulated"),
        Figure(
            "perplexity from scratch over the plain model's",
            math.exp(trained.scratch - trained.plain),
            1.0,
            nothing=math.exp(trained.at_once - trained.plain),
            less=True,
        ),
    )


if __name__ == "__main__":
    main()
