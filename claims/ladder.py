"""Claim: a ladder of branches hides the sums of tensor parallelism: 30% quicker at 70B over 8 GPUs,
with next to no loss where the upper half of a trained model is converted and trained a little.

Zhang et al., "Ladder-Residual", 2025. Measured: prompts and tokens by the steps of
`outsize generate` over emulated links of three rates, plain and as a ladder; the losses of a small
decoder, trained here on text, converted, trained on. Simulated: one token of Llama-70B over 8 H100
(2.3 TB/s reached, sums of 28 us: 38% of the time, as the authors give).
"""

from __future__ import annotations

import math

from retraining import losses
from rewire import to_ladder
from simulated_layers import ladder, layer_of, plain
from slow_links import (
    RATES,
    WHOLE,
    decoder,
    gains,
    mean,
    measured,
)
from verdict import Figure, conclude

CLAIMED = 1.3


def main() -> None:
    model = decoder()
    ways = {
        "plain": (model, 0),
        "plain, --overlap 4": (model, 4),
        "ladder, --overlap 1": (to_ladder(model, 0), 1),
    }
    prompts, tokens = gains(measured(ways), "plain", "ladder, --overlap 1")
    rates = f"links of {', '.join(RATES)}"
    hidden = 8192
    weights = (hidden * (2 * hidden + 2 * 1024.0), 3.0 * hidden * 28672)
    llama = layer_of(1, hidden, weights, 8, 6e14, 2.3e12, 150e9, 2.8e-5, 80)
    theirs, trained = plain(llama) / ladder(llama), losses(to_ladder, lambda m: to_ladder(m, 0))
    print(f"    {trained}")
    conclude(
        'Zhang et al., "Ladder-Residual", 2025',
        "30% quicker at 70B over 8 GPUs; the upper half converted with minimal loss after some"
        " training; as good as the plain model from scratch",
        f"prompts {', '.join(f'{g:.2f}' for g in prompts)}x, tokens"
        f" {', '.join(f'{g:.2f}' for g in tokens)}x at {', '.join(RATES)}; simulated 70B"
        f" {theirs:.2f}x; {trained}",
        f"{WHOLE}; losses: 6 layers, hidden 64, bytes of Python"
        " sources; the paper's GPUs SIMULATED",
        Figure(
            "speed of prompts, mean of the rates",
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
        Figure("speed of a token, 70B over 8", theirs, CLAIMED, how="simulated"),
        Figure(
            "perplexity converted over the plain model's",
            math.exp(trained.after - trained.plain),
            1.0,
            nothing=math.exp(trained.at_once - trained.plain),
            less=True,
        ),
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
