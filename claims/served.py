"""Serving on accelerators of papers, simulated: the product's policies and books of pages, with a
price of steps that follows from bytes and operations.

A step reads all weights once or multiplies by them for each token, whichever takes longer, and
reads the keys and values of what its tokens see.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outsize.serve.asks import Room
from outsize.serve.played import Arrival, Played, play
from outsize.serve.policies import POLICIES
from outsize.serve.price import Curve, Price
from outsize.serve.request import Feed
from outsize.serve.slo import NONE, Slo
from outsize.serve.traffic import Outcome, outcome

PAGE, STEPS = 16, 7  # tokens; of a bisection
_COUNTS = (1, *(1 << n for n in range(4, 14)))


@dataclass(frozen=True)
class Device:
    """bandwidth, flops: bytes and operations a second, of which these parts are had; memory: bytes
    for keys and values."""

    bandwidth: float
    flops: float
    memory: float
    had: tuple[float, float] = (0.8, 0.6)

    def room(self, parameters: float, kept: int, slots: int, budget: int, context: int) -> Room:
        """Of a model of so many parameters in 16 bits. kept: bytes of a token in the cache."""
        bandwidth, flops = self.bandwidth * self.had[0], self.flops * self.had[1]
        reads = 2 * parameters / bandwidth
        fed = [(n, max(reads, 2 * parameters * n / flops)) for n in _COUNTS]
        price = Price(Curve(tuple(fed)), visit=2 * kept / flops, load=kept / bandwidth)
        pages = int(self.memory / kept / PAGE)
        return Room(pages, PAGE, slots, budget, 1 << 60, context, price)


def drawn(median: float, ninth: float, chance: random.Random) -> int:
    """A length by a log-normal law. ninth: its ninetieth percentile."""
    sigma = math.log(ninth / median) / 1.2816
    return max(1, round(chance.lognormvariate(math.log(median), sigma)))


Shape = Callable[[random.Random], tuple[int, int]]


def traffic(rate: float, shape: Shape, count: int) -> list[Arrival]:
    """So many requests a second, by chance; the same ones, sooner or later, at every rate."""
    chance, at, found = random.Random(0), 0.0, list[Arrival]()
    for _ in range(count):
        at += chance.expovariate(1.0) / rate
        found.append(Arrival(at, *shape(chance)))
    return found


def served(room: Room, policy: str, arrivals: Sequence[Arrival]) -> Played:
    return play(room, POLICIES.get(policy), arrivals)


def capacity(room: Room, policy: str, shape: Shape, slo: Slo, count: int = 400) -> float:
    """The most requests a second of which an SLO is kept, at p99, and none is refused."""
    at_once = [replace(one, at=0.0) for one in traffic(1.0, shape, count)]
    high = 2 * outcome(served(replace(room, slo=NONE), policy, at_once), NONE).rate
    low, found = high / 2**7, 0.0
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        if outcome(served(room, policy, traffic(middle, shape, count)), slo).keeps(slo):
            low = found = middle
        else:
            high = middle
    return found


def told(played: Played, slo: Slo = NONE) -> Outcome:
    return outcome(played, slo)


def steps_of(room: Room, policy: str, arrivals: Sequence[Arrival]) -> list[list[Feed]]:
    """Every step by itself."""
    found = list[list[Feed]]()
    play(room, POLICIES.get(policy), arrivals, watch=lambda feeds: found.append(list(feeds)))
    return found
