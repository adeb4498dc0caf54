"""Claim: a ladder of branches hides the sums of tensor parallelism: 30% quicker at 70B over 8 GPUs,
with next to no loss where the upper half of a trained model is converted and trained a little.

Zhang et al., "Ladder-Residual", 2025. Measured: a prompt over emulated links, plain and as a
ladder; the losses of a small decoder, trained here on text, converted, trained on. Simulated: one
token of Llama-70B over 8 H100 (2.3 TB/s reached, sums of 28 us: 38% of the time, as the authors
give).
"""

from __future__ import annotations

import math
from typing import Any

from retraining import losses
from rewire import to_ladder
from simulated_layers import ladder, layer_of, plain
from slow_links import SETTING, Link, balance, cut, decoder, minima, prompt, workers
from verdict import Figure, conclude

from outsize.collectives import World
from outsize.decode.generate import direct

TIMES, CLAIMED = 5, 1.3
FITTED = "the link is fitted to the model"


def measured(world: World) -> tuple[dict[str, float], float]:
    """Seconds of a prompt through a plain model and through a ladder of its layers."""
    model, other, link = decoder(), to_ladder(decoder(), 0), Link()
    cut(model, world, link, 0)
    cut(other, world, link, 1)
    ways: dict[str, Any] = {"plain": direct(model), "ladder": direct(other)}
    rate = balance(world, link, ways["plain"])
    return minima(world, {n: (lambda w=w: prompt(w)) for n, w in ways.items()}, TIMES), rate


def main() -> None:
    found = workers(measured, 2)
    before, after = (max(one[name] for one, _ in found) for name in ("plain", "ladder"))
    hidden = 8192
    weights = (hidden * (2 * hidden + 2 * 1024.0), 3.0 * hidden * 28672)
    llama = layer_of(1, hidden, weights, 8, 6e14, 2.3e12, 150e9, 2.8e-5, 80)
    theirs, trained = plain(llama) / ladder(llama), losses(to_ladder, lambda m: to_ladder(m, 0))
    print(f"    {trained}")
    conclude(
        'Zhang et al., "Ladder-Residual", 2025',
        "30% quicker at 70B over 8 GPUs; the upper half converted with minimal loss after some"
        " training; as good as the plain model from scratch",
        f"{before / after:.2f}x ({before * 1e3:.0f} to {after * 1e3:.0f} ms); simulated 70B"
        f" {theirs:.2f}x; {trained}",
        f"{SETTING} ({found[0][1] * 8e-6:.0f} Mbit/s); losses: 6 layers, hidden 64, bytes of Python"
        " sources; the paper's GPUs SIMULATED",
        Figure(
            "speed of a prompt",
            before / after,
            CLAIMED,
            how="emulated links",
            timed=True,
            other=FITTED,
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
