"""Claim: two halves of a prompt in turns, the sums of one beside the other, take about 35% less
time on 4090 GPUs and 15% less on A800s.

Xiao and Su, "ISO: Overlap of Computation and Communication within Seqenence For LLM Inference",
2024. Measured: prompts by the steps of `outsize generate` over emulated links of three rates, where
the product itself says at each rate whether halves gain; beside them sums one after the other, and
products in chunks (`--overlap 4`). Simulated: models of 30 and 70 billion parameters on 4 and 8 of
either GPU, with prompts of three lengths, by the event simulator. Of a GPU's data sheet 60% are
taken to be reached (4090: 165 TFLOP/s and PCIe 4.0's 32 GB/s; A800: 312 TFLOP/s and 200 GB/s each
way), and a sum to take 20 us before its first byte.
"""

from __future__ import annotations

from itertools import product

from simulated_layers import Layer, halves, layer_of, plain
from slow_links import RATES, WHOLE, decoder, gains, mean, measured
from verdict import Figure, conclude

REACHED, LATENCY = 0.6, 2e-5
GPUS = {"4090": (165e12, 1.0e12, 32e9), "A800": (312e12, 2.0e12, 200e9)}  # FLOP/s, bytes a second
CLAIMED = {"4090": 0.35, "A800": 0.15}
MODELS = {  # layers, hidden, key and value features, inner features
    "30B": (60, 6656, 6656, 17920),
    "70B": (80, 8192, 1024, 28672),
}
LENGTHS, WORKERS = (1024, 4096, 16384), (4, 8)


def layer(gpu: str, model: str, tokens: int, workers: int) -> Layer:
    """One of a model's layers."""
    layers, hidden, keys, inner = MODELS[model]
    weights = (2.0 * hidden * hidden + 2.0 * hidden * keys, 3.0 * hidden * inner)
    flops, memory, rate = (REACHED * one for one in GPUS[gpu])
    return layer_of(tokens, hidden, weights, workers, flops, memory, rate, LATENCY, layers)


def simulated(gpu: str) -> float:
    """The share of a prompt's time that halves spare, mean."""
    every = (layer(gpu, *case) for case in product(MODELS, LENGTHS, WORKERS))
    return 1 - 1 / mean([plain(one) / halves(one) for one in every])


def main() -> None:
    model = decoder()
    found = measured(
        {
            "one after the other": (model, 0),
            "products in chunks": (model, 4),
            "as the product chooses": (model, None),
        }
    )
    prompts, _ = gains(found, "one after the other", "as the product chooses")
    spared = [1 - 1 / gain for gain in prompts]
    theirs = {gpu: simulated(gpu) for gpu in GPUS}
    conclude(
        'Xiao and Su, "ISO", 2024',
        "prompts take about 35% less time on 4090 GPUs, 15% on A800s",
        f"{', '.join(f'{s:.1%}' for s in spared)} less at {', '.join(RATES)}; simulated "
        + ", ".join(f"{s:.1%} on {gpu}" for gpu, s in theirs.items()),
        f"{WHOLE}; the paper's GPUs SIMULATED",
        Figure(
            "less time of a prompt, mean of the rates",
            1 - 1 / mean(prompts),
            CLAIMED["4090"],
            "%",
            nothing=0.0,
            how="emulated links",
            timed=True,
            other=f"links of {', '.join(RATES)}",
        ),
        *(
            Figure(
                f"less time of a prompt on {gpu}",
                theirs[gpu],
                CLAIMED[gpu],
                "%",
                nothing=0.0,
                how="simulated",
            )
            for gpu in GPUS
        ),
    )


if __name__ == "__main__":
    main()
