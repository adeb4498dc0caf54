"""Claim: two halves of a prompt in turns, the sums of one beside the other, take about 35% less
time on 4090 GPUs and 15% less on A800s.

Xiao and Su, "ISO: Overlap of Computation and Communication within Seqenence For LLM Inference",
2024. Simulated: models of 30 and 70 billion parameters on 4 and 8 of either GPU, with prompts of
three lengths, by the event simulator. Sheets and links are the product's catalogue, and what is
reached of them what `outsize plan --serve` prices steps by (outsize/serve/described.py); kernels
start and end in both halves. Every case is printed. Runs over slow links are in
claims/iso_links.py.
"""

from __future__ import annotations

from itertools import product

from simulated_layers import Layer, halves, layer_of, plain
from slow_links import mean
from verdict import Figure, conclude

from outsize.foresight.sources import Roofline
from outsize.hardware import parse_spec
from outsize.serve.described import COMPUTED, KERNELS, SEEN, STARTED, STREAMED

GPUS = {"4090": "8 x RTX-4090", "A800": "8 x A800-SXM-80"}
CLAIMED = {"4090": 0.35, "A800": 0.15}
MODELS = {  # layers, hidden, key and value features, inner features
    "30B": (60, 6656, 6656, 17920),
    "70B": (80, 8192, 1024, 28672),
}
LENGTHS, WORKERS = (1024, 4096, 16384), (4, 8)


def layer(gpu: str, model: str, tokens: int, workers: int, times: int) -> Layer:
    """One of a model's layers, whose kernels run so many times."""
    layers, hidden, keys, inner = MODELS[model]
    weights = (2.0 * hidden * hidden + 2.0 * hidden * keys, 3.0 * hidden * inner)
    node = parse_spec(GPUS[gpu]).groups[0]
    link, device = node.levels[0], node.device
    flops, memory = Roofline(device).peak("bf16") * COMPUTED, device.bandwidth.value * STREAMED
    rate, latency = link.bandwidth.value, link.latency.value
    found = layer_of(tokens, hidden, weights, workers, flops, memory, rate, latency, layers)
    starts = times * KERNELS * STARTED / 2
    # Of every two tokens one sees the other: products of queries and keys, and with values.
    scores = 2.0 * tokens**2 * hidden / workers / (Roofline(device).peak("bf16") * SEEN)
    return Layer(found.attention + starts, found.mlp + starts, found.sum, layers, scores)


def simulated(gpu: str) -> float:
    """The share of a prompt's time that halves spare, mean."""
    gains = []
    for case in product(MODELS, LENGTHS, WORKERS):
        gains.append(plain(layer(gpu, *case, 1)) / halves(layer(gpu, *case, 2)))
        model, tokens, workers = case
        print(f"  {workers} x {gpu}, {model}, {tokens} tokens: {1 - 1 / gains[-1]:.1%} less")
    return 1 - 1 / mean(gains)


def main() -> None:
    spared = {gpu: simulated(gpu) for gpu in GPUS}
    conclude(
        'Xiao and Su, "ISO", 2024',
        "prompts take about 35% less time on 4090 GPUs, 15% on A800s",
        ", ".join(f"{share:.1%} less on {gpu}" for gpu, share in spared.items()),
        f"SIMULATED, mean of {' and '.join(MODELS)}, prompts of"
        f" {', '.join(map(str, LENGTHS))} tokens, {' and '.join(map(str, WORKERS))} GPUs; sheets"
        f" and links of the catalogue, {COMPUTED:.0%} of the peak, {STREAMED:.0%} of the memory's"
        f" bandwidth, {SEEN:.0%} of the peak in scores of attention, {KERNELS} kernels a layer of"
        f" {STARTED * 1e6:.0f} us to start",
        *(
            Figure(
                f"less time of a prompt on {gpu}",
                spared[gpu],
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
