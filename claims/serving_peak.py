"""Claim: a sweep over how many requests go at once finds the peak that a device has.

Martinez, "The Impact of Hyperparameters on Large Language Model Inference Performance: An
Evaluation of vLLM and HuggingFace Pipelines", 2024: throughput by hyperparameters has distinct
peaks, other ones on each GPU; chosen anew for a larger or a smaller GPU, HuggingFace's pipelines
gain 9.16% and 13.7% on average. Here the number is what `outsize plan --serve` says of a price of
steps (outsize/serve/advice.py), without playing one request. Beside it stands the peak of every
number, tried: simulated on two GPUs of the same traffic through the engine's own policy and books
of pages, and run, by the engine on this processor with a small model.

    python claims/serving_peak.py
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

from served import Device, served, traffic
from verdict import Figure, conclude

import outsize
from outsize.checkpoint import hub
from outsize.models.build import build
from outsize.models.decoder import Decoder
from outsize.models.families import parse
from outsize.models.presets import PRESETS
from outsize.serve.advice import advice
from outsize.serve.asks import Room
from outsize.serve.played import Arrival
from outsize.serve.probed import probed

SMALL, LARGE = "V100 of 16 GB", "A100 of 40 GB"
DEVICES = {
    SMALL: Device(0.9e12, 125e12, 3.2e9), LARGE: Device(1.555e12, 312e12, 26e9)
}  # fmt: skip
PARAMETERS, KEPT = 6.05e9, 458_752  # GPT-J's, and bytes of a token in its cache
SLOTS, BUDGET, CONTEXT, COUNT = 256, 2048, 2048, 640  # most at once; of a step; requests
POLICY, PROMPT, NEW = "mixed", 64, (16, 160)
HERE, OWN, ROUNDS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 23, 24, 32), 24, 2  # at once; new tokens; run
AVERAGE = "one model and traffic, not the average of 20"


def room_of(device: str) -> Room:
    return DEVICES[device].room(PARAMETERS, KEPT, SLOTS, BUDGET, CONTEXT)


def arrivals() -> list[Arrival]:
    """All of them at once: the server never waits."""
    some = traffic(1.0, lambda chance: (PROMPT, chance.randint(*NEW)), COUNT)
    return [replace(one, at=0.0) for one in some]


@cache
def rate(device: str, slots: int) -> float:
    """New tokens a second with so many requests at once."""
    room = replace(room_of(device), slots=slots)
    asked = arrivals()
    return sum(one.new for one in asked) / served(room, POLICY, asked).end


def numbers() -> list[int]:
    """All that are tried: every one, further up in steps of an eighth."""
    found = [1]
    while found[-1] < SLOTS:
        found.append(found[-1] + max(1, found[-1] // 8))
    return found


def advised(device: str) -> tuple[int, int]:
    """The fewest requests at once that come near the most tokens a second, and those that make it:
    by the price alone."""
    kept = int(DEVICES[device].memory)
    found = advice(room_of(device), int(2 * PARAMETERS), kept, arrivals())
    return found.few, min(found.best, SLOTS)


def saved(model: Decoder, folder: Path) -> Path:
    hub.save(model, folder)
    return folder


def ran() -> tuple[int, dict[int, float]]:
    """Advised here, and new tokens a second by requests at once."""
    model = build(parse(PRESETS["mini"]), seed=0)
    found = dict.fromkeys(HERE, 0.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        outsize.engine(saved(model, Path(folder)), context=64, requests=max(HERE)) as engine,
    ):
        for _ in range(ROUNDS):
            for many in HERE:
                prompts = [[1 + i] * 8 for i in range(many)]
                begin = time.process_time()
                engine.generate(prompts, max_tokens=OWN)
                took = time.process_time() - begin
                found[many] = max(found[many], many * OWN / took)
    price = probed(model, range(len(model.blocks) + 2), 64, 64)
    room = Room(1 << 12, 64, max(HERE), 64, 1 << 20, 64, price)
    said = advice(room, 0, 0, [Arrival(0.0, 8, OWN)])
    return said.best, found


def main() -> None:
    peaks = {name: max(numbers(), key=lambda n: rate(name, n)) for name in DEVICES}
    said = {name: advised(name) for name in DEVICES}
    at = {name: rate(name, said[name][1]) / rate(name, peaks[name]) for name in DEVICES}
    few = {name: rate(name, said[name][0]) / rate(name, peaks[name]) for name in DEVICES}
    up = rate(LARGE, said[LARGE][1]) / rate(LARGE, said[SMALL][1]) - 1
    down = rate(SMALL, said[SMALL][1]) / rate(SMALL, said[LARGE][1]) - 1
    best, here = ran()
    near = max((n for n in HERE if n <= best), default=HERE[0])
    top = max(HERE, key=lambda n: here[n])
    each = "; ".join(
        f"{name}: {said[name][1]} advised with {at[name]:.1%} of the most, {said[name][0]} with"
        f" {few[name]:.1%}, peak {peaks[name]} at {rate(name, peaks[name]):,.0f} tokens/s"
        for name in DEVICES
    )
    conclude(
        'Martinez, "The Impact of Hyperparameters on LLM Inference Performance", 2024',
        "peaks that a sweep finds; chosen anew 9.16% (a larger GPU) and 13.7% (a smaller) more",
        f"{each}; the other's number kept: {up:.1%} and {down:.1%} less; run: {best} advised,"
        f" {near} have {here[near] / here[top]:.1%} of {top}'s",
        f"simulated: {len(numbers())} numbers up to {SLOTS}, {COUNT} requests of {PROMPT} and"
        f" {NEW[0]} to {NEW[1]} tokens at once, {POLICY}; run: mini, {len(HERE)} numbers,"
        f" {ROUNDS} rounds",
        *(
            Figure(f"tokens/s at the advised number over the peak's, {name}", at[name], 1.0,
                   nothing=0.9, how="simulated")
            for name in DEVICES
        ),
        Figure("gain on a larger GPU", up, 0.0916, "%", nothing=0.0, how="simulated",
               other=AVERAGE),
        Figure("gain on a smaller GPU", down, 0.137, "%", nothing=0.0, how="simulated",
               other=AVERAGE),
        Figure("tokens/s at the advised number over the peak's, here", here[near] / here[top], 1.0,
               nothing=0.8, timed=True, other="a processor"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
