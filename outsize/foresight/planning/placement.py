"""Which machine has which ranks: an order of the machines of a measured cluster for one layout.

What a step loses to its links is close to linear in the time of a byte over the slowest link of
each kind of groups, and of the borders of its stages: the worst border in every beat, all of them
while the pipeline fills. The slopes are those of the forecast itself between the best link and the
worst. Of few machines every order is tried; of more, simulated annealing moves them, with a seed,
and ends in an order that no exchange of two machines betters (Yim et al., "Pipette", 2024, anneal
the same choice by closed forms of their own).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations

import numpy as np

from outsize.foresight.constants import Array
from outsize.foresight.network import Both, Measured, Network
from outsize.hardware.cluster import Cluster

Order = tuple[int, ...]
Kind = tuple[int, int]  # ranks of a ring, and by how much they are apart
TRIED = 6  # machines whose orders are all tried
MOVES, MOST = 150, 8000  # of annealing, for each machine and in all
COLD = 1e-3  # of the first temperature
POLISHED = 32  # machines up to which all exchanges are tried at the end


@dataclass(frozen=True)
class Slopes:
    """Seconds of a step for each second a byte takes: of rings by kind, of the worst border of the
    stages (there and back), and of all borders together."""

    rings: Mapping[Kind, float]
    worst: float
    every: float
    pipeline: Kind  # stages, and ranks of each

    def seconds(self, network: Network) -> float:
        """What a network costs, beside what none of its links changes."""
        found = sum(slope / network.ring(*kind) for kind, slope in self.rings.items())
        if self.worst or self.every:
            each = [_time(both) for both in network.borders(*self.pipeline)]
            found += self.worst * max(each) + self.every * sum(each)
        return found


def best_order(cluster: Cluster, pipeline: Kind, price: Callable[[Network], float]) -> Order:
    """The order of a cluster's machines for a layout, whose seconds on a network `price` gives: the
    best that is found, or as they are numbered where that is as good."""
    rates = np.array(cluster.rates)
    found = slopes(rates, pipeline, price)
    given = tuple(range(cluster.nodes))
    if found is None:
        return given
    node = cluster.groups[0].node

    def cost(order: Sequence[int]) -> float:
        return found.seconds(Measured(rates, node, np.array(order)))

    order = least(cost, cluster.nodes)
    both = (price(Measured(rates, node, np.array(each))) for each in (given, order))
    return order if next(both) > next(both) else given


def slopes(rates: Array, pipeline: Kind, price: Callable[[Network], float]) -> Slopes | None:
    """Of a layout; None where no link between machines matters to it."""
    apart = rates[~np.eye(len(rates), dtype=bool)]
    best, worst = float(apart.max()), float(apart.min())
    span = 1 / worst - 1 / best
    seen = _Alike(best)
    base = price(seen)
    if span <= 0 or not (seen.rings or seen.sent):
        return None
    rings = {kind: (price(_Alike(best, {kind: worst})) - base) / span for kind in seen.rings}
    if not seen.sent:
        return Slopes(rings, 0.0, 0.0, pipeline)
    every = price(_Alike(best, border=worst))
    one = price(_Alike(best, border=worst, quick=True))
    each = (every - one) / (2 * span)
    all_ = (every - base) / (2 * span)
    borders = pipeline[0] - 1
    if borders == 1:  # the worst and all are one
        return Slopes(rings, all_, 0.0, pipeline)
    return Slopes(rings, max(0.0, all_ - borders * each), each, pipeline)


@dataclass
class _Alike:
    """A network whose links are alike, but for rings of some kinds, and borders. quick: one of the
    borders is as fast as the rest of the network. It keeps what it was asked for."""

    best: float
    slow: Mapping[Kind, float] = field(default_factory=dict)
    border: float = 0.0
    quick: bool = False
    rings: dict[Kind, None] = field(default_factory=dict)
    sent: bool = False

    def ring(self, size: int, stride: int) -> float:
        self.rings[size, stride] = None
        return self.slow.get((size, stride), self.best)

    def borders(self, stages: int, stride: int) -> Sequence[Both]:
        self.sent = True
        rate = self.border or self.best
        first = self.best if self.quick else rate
        return [(first, first), *[(rate, rate)] * (stages - 2)]


def _time(both: Both) -> float:
    """Seconds of a byte there and of one back."""
    return sum(1 / rate for rate in both if rate)


# -- the least of all orders -----------------------------------------------------------------------


def least(cost: Callable[[Sequence[int]], float], count: int, seed: int = 0) -> Order:
    """The order of so many machines that costs least; of more than a few, the best that annealing
    finds. The same for a seed."""
    if count <= TRIED:
        return min(permutations(range(count)), key=cost)
    found = _annealed(cost, count, random.Random(seed))
    return _polished(cost, found) if count <= POLISHED else found


def _annealed(cost: Callable[[Sequence[int]], float], count: int, draw: random.Random) -> Order:
    order = list(range(count))
    now = cost(order)
    best, found = now, tuple(order)
    some = [cost(draw.sample(order, count)) for _ in range(16)]
    warm = max(some) - min(*some, now) or 1e-12
    steps = min(MOST, MOVES * count)
    for step in range(steps):
        other = _moved(order, draw)
        then = cost(other)
        heat = warm * COLD ** (step / steps)
        if then <= now or draw.random() < math.exp((now - then) / heat):
            order, now = other, then
            if now < best:
                best, found = now, tuple(order)
    return found


def _moved(order: list[int], draw: random.Random) -> list[int]:
    """Two machines exchanged, a run of them turned round, or one put elsewhere."""
    a, b = sorted(draw.sample(range(len(order)), 2))
    made, kind = list(order), draw.randrange(3)
    if kind == 0:
        made[a], made[b] = made[b], made[a]
    elif kind == 1:
        made[a : b + 1] = made[a : b + 1][::-1]
    else:
        made.insert(b, made.pop(a))
    return made


def _polished(cost: Callable[[Sequence[int]], float], order: Order) -> Order:
    """No exchange of two machines is better any more."""
    now = cost(order)
    while True:
        best = min(_exchanged(order), key=cost)
        then = cost(best)
        if then >= now * (1 - 1e-12):
            return order
        order, now = best, then


def _exchanged(order: Order) -> Iterator[Order]:
    for a, b in combinations(range(len(order)), 2):
        made = list(order)
        made[a], made[b] = made[b], made[a]
        yield tuple(made)
