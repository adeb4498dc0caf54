"""Claim: steps of one number of tokens: 2.3x the throughput in time, 2x and 3.7x less latency.

Holmes et al., "DeepSpeed-FastGen: High-throughput Text Generation for LLMs via MII and
DeepSpeed-Inference", 2024, beside vLLM: Llama-2-70B on four A100s, prompts of 2,600 tokens, 1 to 32
clients that send their next request when the last is done, 512 requests. In time is a request whose
own prompt goes at 512 tokens a second and whose tokens, by an exponential average over a span of
16, never come slower than 4 a second, as the authors' script judges each one (DeepSpeedExamples,
plot_effective_throughput.py); the most requests a second in time are compared, of any number of
clients. Latency is compared at the same throughput, that of tokens with 16 clients and answers of
128. Simulated: the product's `fixed`, whose number of tokens follows from the price of steps, and
`mixed` in steps of at most so many tokens, of which the best at throughput in time is judged in all
three; beside `prompt-first` with whole prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from served import Device, Shape, traffic
from verdict import Figure, conclude

from outsize.serve.asks import Room
from outsize.serve.played import play
from outsize.serve.policies import POLICIES
from outsize.serve.request import Feed, foretold

FOUR = Device(4 * 2.0e12, 4 * 312e12, 4 * 72e9 - 140e9, (0.8, 0.5))
PARAMETERS, KEPT, CONTEXT, SLOTS = 70e9, 327_680, 4096, 128
PROMPT, NEW, LONGER, COUNT = 2600, 60, 128, 512
READ, COMES, SPAN = 512, 4, 16  # tokens a second of a prompt and of an answer; of an average
CLIENTS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
BUDGETS = (512, 1024, 2048)
TIMED = 16  # clients where tokens are timed


def shape(new: int) -> Shape:
    """Normal, with a deviation of 30%."""

    def of(chance: random.Random) -> tuple[int, int]:
        prompt, tokens = (max(1, round(chance.gauss(mean, 0.3 * mean))) for mean in (PROMPT, new))
        return min(prompt, CONTEXT - tokens), tokens

    return of


@dataclass(frozen=True)
class Ran:
    """Requests a second, all and in time; mean seconds of one; seconds from token to token."""

    rate: float
    good: float
    latency: float
    gaps: np.ndarray


def slowest(gaps: np.ndarray) -> float:
    """The largest of the exponential averages of seconds from token to token (pandas' `ewm`)."""
    keep, above, below, worst = 1 - 2 / (SPAN + 1), 0.0, 0.0, 0.0
    for gap in gaps:
        above, below = gap + keep * above, 1 + keep * below
        worst = max(worst, above / below)
    return worst


def ran(room: Room, policy: str, clients: int, new: int = NEW) -> Ran:
    """A slot is a client: whoever has it next is sent when the last one is done."""
    some = [replace(one, at=0.0) for one in traffic(1.0, shape(new), COUNT)]
    comes, now = dict[int, list[float]](), 0.0

    def watch(feeds: Sequence[Feed]) -> None:
        nonlocal now
        parts = [feed.part for feed in feeds]
        now += foretold(room.price, [(p.start, p.tokens, not p.ahead) for p in parts])
        for feed in feeds:
            if not feed.part.ahead:
                comes.setdefault(feed.request.key, []).append(now)

    played = play(replace(room, slots=clients), POLICIES.get(policy), some, watch=watch)
    assert abs(played.end - now) < 1e-6 * now and len(comes) == COUNT
    times = [np.array(comes[key]) for key in sorted(comes)]
    sent = [0.0] * clients + sorted(each[-1] for each in times)
    good = sum(
        each[0] - begun <= one.prompt / READ and slowest(np.diff(each)) < 1 / COMES
        for one, begun, each in zip(some, sent, times, strict=False)
    )
    latency = np.mean([each[-1] - begun for begun, each in zip(sent, times, strict=False)])
    gaps = np.concatenate([np.diff(each) for each in times])
    return Ran(COUNT / now, good / now, float(latency), gaps)


def sooner(ours: Sequence[Ran], theirs: Sequence[Ran]) -> float:
    """How many times lower a request's latency is at the same requests a second, the most."""
    known = sorted((one.rate, one.latency) for one in theirs)
    rates, seconds = zip(*known, strict=True)
    return max(
        float(np.interp(one.rate, rates, seconds)) / one.latency
        for one in ours
        if rates[0] <= one.rate <= rates[-1]
    )


def main() -> None:
    whole = FOUR.room(PARAMETERS, KEPT, SLOTS, CONTEXT, CONTEXT)
    ways = {
        "prompt-first": (whole, "prompt-first"),
        "fixed": (replace(whole, budget=1024), "fixed"),
    }
    ways |= {f"mixed {n}": (replace(whole, budget=n), "mixed") for n in BUDGETS}
    found = {name: [ran(*way, clients) for clients in CLIENTS] for name, way in ways.items()}
    best = {name: max(one.good for one in each) for name, each in found.items()}
    for name, each in found.items():
        words = ", ".join(f"{one.good:.2f} of {one.rate:.2f} ({one.latency:.1f} s)" for one in each)
        print(f"  {name}: requests/s in time of all, and latency, of {CLIENTS} clients: {words}")
    theirs, ours = "prompt-first", max((n for n in ways if n != "prompt-first"), key=best.get)
    tails = [
        float(np.percentile(ran(*ways[name], TIMED, LONGER).gaps, 95)) for name in (theirs, ours)
    ]
    gain, less = best[ours] / best[theirs], sooner(found[ours], found[theirs])
    tail = tails[0] / tails[1]
    conclude(
        'Holmes et al., "DeepSpeed-FastGen", 2024',
        "up to 2.3x effective throughput, 2x lower latency on average, 3.7x lower tail latency of"
        " tokens than vLLM",
        "the most requests/s in time: "
        + ", ".join(f"{name} {rate:.2f}" for name, rate in best.items())
        + f"; {ours}: {gain:.2f}x, latency at the same throughput {less:.2f}x lower at most, p95 of"
        f" tokens {tail:.2f}x lower ({tails[0] * 1e3:.0f} to {tails[1] * 1e3:.0f} ms); `fixed` has"
        f" steps of {whole.price.enough} tokens",
        "SIMULATED four A100s (80% of their bandwidth, 50% of their operations; sums over them take"
        f" no time), Llama-2-70B, prompts of {PROMPT} and {NEW} new tokens, 30% deviation, {COUNT}"
        f" requests of {CLIENTS[0]} to {CLIENTS[-1]} clients; in time: the prompt at {READ}"
        f" tokens/s, averages over {SPAN} tokens at {COMES}; p95 with {TIMED} clients and"
        f" {LONGER} new tokens",
        Figure("throughput in time, the most", gain, 2.3, how="simulated"),
        Figure("latency lower at the same throughput, the most", less, 2.0, how="simulated"),
        Figure("latency of tokens at p95 lower", tail, 3.7, how="simulated"),
    )


if __name__ == "__main__":
    main()
