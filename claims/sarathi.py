"""Claim: beside a slice of a prompt a token takes up to 10x less; 1.33x the throughput in all; and
a pipeline of stages has 6.29x fewer bubbles and 1.91x the throughput.

Agrawal et al., "SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked Prefills",
2023. Simulated: the product's `decode-maximal` beside whole prompts by `prompt-first`.

  one device  LLaMA-13B on an A6000: sequences of 1,024 to 3,072 tokens, from two at once to all
              that the cache holds, slices of 256 and 512 tokens, and as many new tokens as find a
              place beside the slices of all prompts, which is where the paper has its peaks. Its
              figures are the most that it found over such a sweep; all of ours is printed. What a
              token takes beside a slice is what that step takes beyond the slice alone.
  pipeline    GPT-3 in eight stages of eight A100 each: every stage takes the steps of eight groups
              of requests by turns, a step of a group follows its last one through the last stage.
              A request's bubbles are what the stages wait for the steps that it is in; the paper
              gives the median. Beside it whole prompts in both ways that the product has, with
              lengths by Zipf's law, as we recall the paper's, and all alike; the worst is judged.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median

from served import PAGE, Device, served, steps_of
from verdict import Figure, conclude

from outsize.serve.asks import Room
from outsize.serve.played import Arrival
from outsize.serve.price import Price
from outsize.serve.request import Feed, foretold
from outsize.simulate.events import Node, run

A6000 = Device(768e9, 155e12, 16e9)
PARAMETERS, KEPT = 13e9, 819_200
CONTEXTS, AT_ONCE, SLICES = (1024, 2048, 3072), (2, 4, 8, 16), (256, 512)
TURNS = 10  # requests for each that is there at once

STAGES, WIDE, LAYERS, HIDDEN, LARGE = 8, 8, 96, 12288, 175e9  # WIDE: devices of a stage
A100 = Device(2.039e12 * WIDE, 312e12 * WIDE, WIDE * 0.9 * 80e9 - 2 * LARGE / STAGES)
STAGE_KEPT = 2 * 2 * HIDDEN * LAYERS // STAGES  # bytes of a token in a stage
SHORT, LONG, RATIO = 1024, 4096, 10  # tokens; a prompt's over new ones
SKEWS = (0.4, 0.0)  # of Zipf's law


def seconds(feeds: list[Feed], price: Price) -> float:
    return foretold(price, [(f.part.start, f.part.tokens, not f.part.ahead) for f in feeds])


# -- one device ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """tokens: milliseconds of one by itself and beside a slice; faster: throughput over."""

    tokens: tuple[float, float]
    faster: float

    @property
    def quicker(self) -> float:
        return self.tokens[0] / self.tokens[1]


def token(steps: list[list[Feed]], price: Price, prompt: int, beside: bool) -> float:
    """Mean milliseconds of a token that is drawn behind another one. beside: only of those in steps
    that have a slice too."""
    spent, count = 0.0, 0
    for feeds in steps:
        draws = [f for f in feeds if f.part.tokens == 1 and f.part.start >= prompt]
        others = [f for f in feeds if f not in draws]
        if draws and bool(others) == beside:
            spent += seconds(feeds, price) - (seconds(others, price) if others else 0.0)
            count += len(draws)
    return 1e3 * spent / count


def gain(context: int, slots: int, size: int) -> Gain:
    new = max(2, round(context * (slots - 1) / (size + slots - 1)))
    whole = A6000.room(PARAMETERS, KEPT, slots, context * slots, context)
    sliced = replace(whole, budget=size)
    some = [Arrival(0.0, context - new, new) for _ in range(TURNS * slots)]
    ways = (whole, "prompt-first"), (sliced, "decode-maximal")
    ends = [served(room, policy, some).end for room, policy in ways]
    each = [
        token(steps_of(room, policy, some), whole.price, context - new, room is sliced)
        for room, policy in ways
    ]
    return Gain((each[0], each[1]), ends[0] / ends[1])


def sweep() -> dict[tuple[int, int, int], Gain]:
    """By tokens of a sequence, requests at once, and tokens of a slice."""
    found = {}
    for context in CONTEXTS:
        most = int(A6000.memory / KEPT / PAGE) // -(-context // PAGE)
        for slots in (*(n for n in AT_ONCE if n < most), most):
            for size in SLICES:
                one = found[context, slots, size] = gain(context, slots, size)
                print(
                    f"  {context:,} tokens, {slots} at once, slices of {size}: a token"
                    f" {one.tokens[0]:.2f} ms, {one.tokens[1]:.2f} beside a slice,"
                    f" {one.quicker:.1f}x; throughput {one.faster:.2f}x"
                )
    return found


# -- pipeline --------------------------------------------------------------------------------------


def lengths(count: int, skew: float) -> list[Arrival]:
    """By Zipf's law, the shortest most often."""
    chance, sizes = random.Random(0), range(SHORT, LONG + 1)
    law = [(1 + size - SHORT) ** -skew for size in sizes]
    drawn = chance.choices(sizes, law, k=count)
    return [Arrival(0.0, size - (new := size // (RATIO + 1)), new) for size in drawn]


def piped(room: Room, policy: str, every: list[Arrival]) -> tuple[float, float]:
    """Seconds of all requests, and the median of what stages wait for a request's steps."""
    queues = [steps_of(room, policy, every[group::STAGES]) for group in range(STAGES)]
    nodes, asking, last = list[Node](), list[list[tuple[int, int]]](), dict[int, int]()
    for turn in range(max(map(len, queues))):
        for group, steps in enumerate(queues):
            if turn >= len(steps):
                continue
            took = seconds(steps[turn], room.price)
            for stage in range(STAGES):
                before = (last[group],) if group in last else ()
                last[group] = len(nodes)
                nodes.append(Node(stage, "compute", took, before))
                asking.append([(group, feed.request.key) for feed in steps[turn]])
    ran, free, waits = run(nodes), [0.0] * STAGES, defaultdict[tuple[int, int], float](float)
    for i in sorted(range(len(nodes)), key=lambda i: ran.starts[i]):
        stage = nodes[i].worker
        for one in asking[i]:
            waits[one] += ran.starts[i] - free[stage]
        free[stage] = ran.ends[i]
    return ran.makespan, median(waits.values())


def pipeline() -> tuple[int, float, float]:
    """Requests of a group, as many as fit; bubbles and seconds of whole prompts over those of
    slices, the least."""
    slots = int(A100.memory / STAGE_KEPT / LONG / STAGES)
    own = replace(A100, memory=A100.memory / STAGES)
    whole = own.room(LARGE / STAGES, STAGE_KEPT, slots, LONG * slots, LONG)
    fewer, sooner = list[float](), list[float]()
    for skew in SKEWS:
        every = lengths(2 * slots * STAGES, skew)
        end, waits = piped(replace(whole, budget=SLICES[0]), "decode-maximal", every)
        print(f"  pipeline, Zipf {skew}: {end:.1f} s, {waits:.2f} s of bubbles of a request")
        for policy in ("first-come", "prompt-first"):
            others = piped(whole, policy, every)
            print(f"    {policy}: {others[0]:.1f} s, {others[1]:.2f} s of bubbles")
            sooner.append(others[0] / end)
            fewer.append(others[1] / waits)
    return slots, min(fewer), min(sooner)


def main() -> None:
    found = sweep()
    quicker = max(found, key=lambda key: found[key].quicker)
    faster = max(found, key=lambda key: found[key].faster)
    slots, fewer, sooner = pipeline()
    conclude(
        'Agrawal et al., "SARATHI", 2023',
        "LLaMA-13B on an A6000: tokens up to 10x quicker, up to 1.33x the throughput; GPT-3 on a"
        " pipeline: 6.29x fewer bubbles, 1.91x the throughput",
        f"a token up to {found[quicker].quicker:.1f}x quicker beside a slice ({quicker[1]} at once,"
        f" {quicker[0]:,} tokens), {min(x.quicker for x in found.values()):.1f}x at least;"
        f" throughput up to {found[faster].faster:.2f}x ({faster[1]} at once, {faster[0]:,} tokens,"
        f" slices of {faster[2]}); on a pipeline {fewer:.1f}x fewer bubbles of a request and"
        f" {sooner:.2f}x the throughput, at the least of both laws and both ways",
        "SIMULATED A6000, and 64 A100 of 80 GB (80% of their bandwidth, 60% of their operations);"
        f" the pipeline: {STAGES} stages, {STAGES} groups of {slots} at once, {SHORT:,} to"
        f" {LONG:,} tokens, {RATIO} of a prompt for a new one, slices of {SLICES[0]}",
        Figure("quicker tokens, the most", found[quicker].quicker, 10.0, how="simulated"),
        Figure("throughput, the most", found[faster].faster, 1.33, how="simulated"),
        Figure("fewer bubbles of a pipeline", fewer, 6.29, how="simulated"),
        Figure("throughput on a pipeline", sooner, 1.91, how="simulated"),
    )


if __name__ == "__main__":
    main()
