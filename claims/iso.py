"""Claim: prompts in two halves, one computing while the other is summed, take 35% less time on
accelerators with slow links, 15% less with fast ones.

Xiao and Su, "ISO: Overlap of Computation and Communication within Sequence for LLM Inference",
2024: models of 30B and 70B on RTX 4090 and A800. Measured over emulated links; simulated for four
of each of the paper's accelerators (100 TFLOP/s and 12 GB/s, 190 TFLOP/s and 150 GB/s, reached).
"""

from __future__ import annotations

from typing import Any

from simulated_layers import halves, layer_of, plain
from slow_links import SETTING, Link, balance, cut, decoder, minima, prompt, workers
from verdict import verdict

from outsize.collectives import World
from outsize.decode.generate import direct
from outsize.parallel.iso import in_halves

TIMES = 10


def measured(world: World) -> tuple[dict[str, float], float, float]:
    """Seconds of a prompt as it is and in halves; the relative difference of the logits."""
    model, link = decoder(), Link()
    overlap = cut(model, world, link, 1)
    assert overlap is not None
    ways: dict[str, Any] = {"whole": direct(model), "halves": in_halves(model, overlap)}
    rate = balance(world, link, ways["whole"])
    given = {name: prompt(way) for name, way in ways.items()}
    largest = given["whole"].abs().max()
    worst = float((given["whole"] - given["halves"]).abs().max() / largest)
    return minima(world, {n: (lambda w=w: prompt(w)) for n, w in ways.items()}, TIMES), worst, rate


def simulated(flops: float, rate: float) -> float:
    """The part of the time that goes, for a model of 30B (60 layers, hidden 6656), 4096 tokens."""
    hidden = 6656
    weights = (4.0 * hidden**2, 8.0 * hidden**2)
    layer = layer_of(4096, hidden, weights, 4, flops, 1e12, rate, 3e-5, 60)
    return 1 - halves(layer) / plain(layer)


def main() -> None:
    found = workers(measured, 2)
    whole, parts = (max(one[name] for one, _, _ in found) for name in ("whole", "halves"))
    worst = max(difference for _, difference, _ in found)
    slow, fast = simulated(100e12, 12e9), simulated(190e12, 150e9)
    verdict(
        'Xiao and Su, "ISO", 2024',
        "35% less time for a prompt on RTX 4090, 15% on A800",
        f"{1 - parts / whole:.0%} less ({whole * 1e3:.0f} to {parts * 1e3:.0f} ms), logits differ"
        f" by {worst:.0e}; simulated: {slow:.0%} on the 4090's links, {fast:.0%} on the A800's",
        parts < 0.95 * whole and worst < 1e-4 and slow > 0.3 and fast > 0.05,
        f"{SETTING} ({found[0][2] * 8e-6:.0f} Mbit/s); the paper's accelerators SIMULATED",
    )


if __name__ == "__main__":
    main()
