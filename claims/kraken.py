"""Claim: sub-layers that are summed once a layer, beside the next attention, give the first token
35.6% sooner, at the perplexity of a plain transformer.

Prabhakar et al., "Kraken: Inherently Parallel Transformers For Efficient Multi-Device Inference",
2024. Measured: prompts and tokens by the steps of `outsize generate` over emulated links of three
rates; the losses of a small decoder in two ways from scratch, and, which the paper does not do,
converted from a trained plain one. Simulated: prompts of 128 and 2048 tokens of models like GPT-3's
over 4 and 8 A100 (190 TFLOP/s, 1.2 TB/s and 200 GB/s reached, 20 us a sum), as many weights in
both.
"""

from __future__ import annotations

import math

from retraining import losses
from rewire import fresh_kraken, to_kraken
from simulated_layers import kraken, layer_of, plain
from slow_links import (
    RATES,
    WHOLE,
    decoder,
    gains,
    mean,
    measured,
)
from verdict import Figure, conclude

CLAIMED = 1.356
SIZES = {"1.3B": (24, 2048), "6.7B": (32, 4096), "13B": (40, 5120), "65B": (80, 8192)}


def simulated(layers: int, hidden: int, tokens: int, workers_: int) -> float:
    """How much sooner the first token comes."""
    weights = (4.0 * hidden**2, 8.0 * hidden**2)
    layer = layer_of(tokens, hidden, weights, workers_, 190e12, 1.2e12, 200e9, 2e-5, layers)
    return plain(layer) / kraken(layer)


def main() -> None:
    model = decoder()
    ways = {
        "plain": (model, 0),
        "plain, --overlap 4": (model, 4),
        "kraken, --overlap 1": (to_kraken(model, 2), 1),
    }
    prompts, tokens = gains(measured(ways), "plain", "kraken, --overlap 1")
    rates = f"links of {', '.join(RATES)}"
    theirs = [
        simulated(layers, hidden, tokens, n)
        for layers, hidden in SIZES.values()
        for tokens in (128, 2048)
        for n in (4, 8)
    ]
    of_sizes = mean(theirs)
    trained = losses(lambda m: to_kraken(m, 2), lambda m: fresh_kraken(m, 2))
    print(f"    {trained}")
    conclude(
        'Prabhakar et al., "Kraken", 2024',
        "first token 35.6% sooner (mean), at a similar perplexity",
        f"prompts {', '.join(f'{g:.2f}' for g in prompts)}x, tokens"
        f" {', '.join(f'{g:.2f}' for g in tokens)}x at {', '.join(RATES)}; simulated"
        f" {min(theirs):.2f} to {max(theirs):.2f}x, mean {of_sizes:.2f}x; {trained}",
        f"{WHOLE}; losses: two ways, 6 layers, hidden 64, bytes"
        " of Python sources; the paper's GPUs SIMULATED",
        Figure(
            "first token, sooner, mean of the rates",
            mean(prompts),
            CLAIMED,
            how="emulated links",
            timed=True,
            other=rates,
        ),
        Figure(
            "speed of a token, mean of the rates",
            mean(tokens),
            CLAIMED,
            how="emulated links",
            timed=True,
            other=rates,
        ),
        Figure("first token, sooner, mean of the sizes", of_sizes, CLAIMED, how="simulated"),
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
