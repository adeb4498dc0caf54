"""Plans whose workers differ: what each of them has, and how much of the work each kind takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outsize.foresight.constants import Array
from outsize.foresight.layout import Layout
from outsize.foresight.memory import Memory
from outsize.foresight.planning.choose import Priced
from outsize.foresight.shape import Shape
from outsize.foresight.step import beat, terms, together
from outsize.hardware.cluster import Cluster, Group


@dataclass(frozen=True)
class Part:
    """A stage, or like workers of the data axis. blocks: of the model; beat: seconds of a
    microbatch; room: bytes of its device; count: workers; rows: of a step, on each of them."""

    device: str
    blocks: int
    beat: float
    memory: Memory
    room: int
    count: int
    rows: int


@dataclass(frozen=True)
class Uneven:
    """A layout whose workers differ, with its forecast. shares: of a step's rows, by worker of the
    data axis; () where they are equal."""

    layout: Layout
    parts: tuple[Part, ...]
    seconds: float
    low: float
    high: float
    mfu: float
    microbatches: int
    shares: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(part.blocks for part in self.parts) if self.layout.pipeline > 1 else ()


@dataclass(frozen=True)
class Speeds:
    """Of one kind of device, by how much it is given: seconds of a beat in the middle and at the
    end, of sums that nothing hides and of the update; the factor of waiting; by how much sends over
    other borders are shorter than over the slowest, in sum."""

    group: Group
    middle: Array
    last: Array
    sums: Array
    update: Array
    spread: float
    spare: Array


def speeds(cluster: Cluster, group: Group, made: Sequence[tuple[Shape, Layout]]) -> Speeds:
    """Of models of one shape and their layouts as they are on such devices alone."""
    alone = replace(cluster, groups=(group,), rates=())
    shape, lays = made[0][0], [lay for _, lay in made]
    counted = [replace(terms(one, lay, alone), nodes=cluster.nodes) for one, lay in made]
    priced = Priced.of(shape, lays, group.device.name, counted)
    batch = priced.model.priced(priced.batch, priced.values)
    middle, last = beat(batch.middle), beat(batch.last)
    window = np.maximum(middle, last) * batch.window + 1e-9
    sums = together(window, batch.end["sums"]) - window
    waits = priced.model.factor("nodes", priced.values)[0]
    spread = float(1 + waits * math.log2(max(1, cluster.nodes)))
    return Speeds(group, middle, last, sums, batch.end["update"], spread, batch.spare)


def level(total: int, takes: Sequence[Array], holds: Sequence[int]) -> tuple[int, ...]:
    """Of `total` things so many to each, one or more, that the slowest takes least. takes: by each,
    rising seconds of 1, 2, ... of them; holds: at most, all together enough."""
    times = np.unique(np.concatenate(takes))

    def within(limit: float) -> list[int]:
        return [
            min(held, int(np.searchsorted(of, limit, side="right")))
            for held, of in zip(holds, takes, strict=True)
        ]

    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        found = within(times[middle])
        if min(found) >= 1 and sum(found) >= total:
            high = middle
        else:
            low = middle + 1
    found = within(times[low])
    while sum(found) > total:  # the slowest gives back first
        some = (i for i in range(len(found)) if found[i] > 1)
        found[max(some, key=lambda i: takes[i][found[i] - 1])] -= 1
    return tuple(found)
