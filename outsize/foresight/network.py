"""Rates between nodes as a forecast asks for them: of rings of ranks, and of a pipeline's borders.

A measured matrix (outsize/hardware/cluster.py) has its nodes in the order of the ranks on them. A
ring goes from node to node in that order and is as fast as the slowest of these links; groups of
one kind run at once, and a step waits for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outsize.hardware.cluster import Cluster

Both = tuple[float, float]  # B/s forward and back over a border; 0 within a node
Ints = npt.NDArray[np.int64]


class Network(Protocol):
    """B/s of one device between nodes."""

    def ring(self, size: int, stride: int) -> float:
        """Of the slowest link of the rings of all groups of `size` ranks `stride` apart; 0: as the
        level has it."""

    def borders(self, stages: int, stride: int) -> Sequence[Both]:
        """Of the slowest link over each border of stages of `stride` ranks."""


def network_of(cluster: Cluster) -> Network | None:
    """As it was measured; None where it was not."""
    if not cluster.rates or cluster.nodes < 2:
        return None
    return Measured(np.array(cluster.rates), cluster.groups[0].node)


@dataclass(frozen=True, eq=False)
class Measured:
    """A matrix of rates. order: the node that has the ranks of each place; (): in turn."""

    rates: npt.NDArray[np.float64]
    node: int
    order: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def ring(self, size: int, stride: int) -> float:
        first, second = ring_links(size, stride, self.node, len(self.rates))
        return self._least(first, second) if len(first) else 0.0

    def borders(self, stages: int, stride: int) -> Sequence[Both]:
        found = []
        for first, second in border_links(stages, stride, self.node):
            there = len(first) > 0
            both = (self._least(first, second), self._least(second, first)) if there else (0.0, 0.0)
            found.append(both)
        return found

    def _least(self, first: Ints, second: Ints) -> float:
        if len(self.order):
            first, second = self.order[first], self.order[second]
        return float(self.rates[first, second].min())


@cache
def ring_links(size: int, stride: int, node: int, nodes: int) -> tuple[Ints, Ints]:
    """Places of nodes that the rings of a kind of groups join, from each to the next."""
    ranks = np.arange(node * nodes)
    begins = ranks[ranks // stride % size == 0]
    every = begins[:, None] + stride * np.arange(size)
    places = every[every[:, -1] < len(ranks)] // node
    return _links(places.ravel(), np.roll(places, -1, axis=1).ravel())


@cache
def border_links(stages: int, stride: int, node: int) -> tuple[tuple[Ints, Ints], ...]:
    """The same of the pairs of ranks over each border of a pipeline."""
    ranks = np.arange(stride)
    return tuple(
        _links((b * stride + ranks) // node, ((b + 1) * stride + ranks) // node)
        for b in range(stages - 1)
    )


def _links(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Each pair of different places once."""
    apart = first != second
    pairs = np.unique(np.stack([first[apart], second[apart]], axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]
