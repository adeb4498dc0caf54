"""A plan on hardware that is described: the layout that is asked for, or the fastest that fits.

Every layout of a mesh, rows, recompute, sharding and chunks is counted by closed bounds; those that
hold too many bytes are left out before their seconds are asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from outsize.errors import OutsizeError
from outsize.foresight.constants import Model, batch_of, tags
from outsize.foresight.conventions import COUNTS
from outsize.foresight.fitted import fitted
from outsize.foresight.layout import Layout, Recompute, Stack
from outsize.foresight.memory import Memory, memory
from outsize.foresight.score import published
from outsize.foresight.shape import Shape
from outsize.foresight.sources import Roofline
from outsize.foresight.step import Terms, terms
from outsize.hardware.cluster import Cluster

# Our own trainer: two bytes of weights and of gradients, twelve of the optimizer, as docs/memory.md
# has them; sums of gradients run beside the last backward passes.
STACK = Stack("outsize", gradients=2, optimizer=12, fused=False, norms=True, scattered=True)
ROWS = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 4)
MOST = 20_000  # layouts that are counted; a search with more is told so


@dataclass(frozen=True)
class Asked:
    """What is to be trained. None where the choice is open. batch: rows of a step."""

    sequence: int
    batch: int
    precision: str = "bf16"
    mesh: tuple[int, int, int, int] | None = None  # tensor, pipeline, context, expert
    rows: int | None = None
    recompute: Recompute | None = None
    zero: int | None = None
    chunks: int | None = None
    memory: int | None = None  # bytes of a device, at most


@dataclass(frozen=True)
class Planned:
    """A layout with its forecast. lanes: seconds of a step by lane; low, high: of the step."""

    layout: Layout
    seconds: float
    low: float
    high: float
    lanes: dict[str, float]
    memory: Memory
    room: int
    operations: float  # of a step, as mfu counts them
    peak: float  # FLOP/s of all devices

    @property
    def fits(self) -> bool:
        return self.memory.process <= self.room

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.layout.batch * self.layout.sequence

    @property
    def mfu(self) -> float:
        return self.operations / (self.seconds * self.peak)

    @property
    def binds(self) -> str:
        """The lane that takes longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])


@dataclass(frozen=True)
class Choice:
    """Plans from the fastest on; how many layouts were counted, and how many of them fit."""

    plans: Sequence[Planned]
    counted: int
    fitting: int


def choose(shape: Shape, asked: Asked, cluster: Cluster, top: int = 5) -> Choice:
    """The fastest layouts that fit; where none does, the one that lacks the fewest bytes.

    Raises OutsizeError for unlike devices, and where no layout has what is asked."""
    if not cluster.alike:
        names = ", ".join(group.device.name for group in cluster.groups)
        raise OutsizeError(f"hardware of unlike devices ({names}); plans are of one kind yet")
    made = list(layouts(shape, asked, cluster))
    if not made:
        raise OutsizeError(
            f"no layout of {cluster.count} devices has what is asked;"
            " expected axes that divide devices, heads and layers"
        )
    room = asked.memory or cluster.groups[0].device.memory_bytes
    held = [memory(shape, layout) for layout in made]
    good = [i for i, each in enumerate(held) if each.process <= room]
    kept = good or [min(range(len(made)), key=lambda i: held[i].process)]
    plans = forecast(shape, [made[i] for i in kept], cluster, [held[i] for i in kept], room)
    return Choice(plans[:top], len(made), len(good))


def layouts(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[Layout]:
    """All that could carry out what is asked. Raises OutsizeError for more than can be counted."""
    count = 0
    for mesh in _meshes(shape, asked, cluster):
        for rows, recompute, zero, chunks in product(
            (asked.rows,) if asked.rows else ROWS,
            (asked.recompute,) if asked.recompute else ("none", "full"),
            (0, 1, 3) if asked.zero is None else (asked.zero,),
            (asked.chunks,) if asked.chunks else CHUNKS,
        ):
            found = _layout(shape, asked, cluster.count, mesh, (rows, recompute, zero, chunks))
            if found is not None:
                count += 1
                yield found
            if count > MOST:
                raise OutsizeError(f"over {MOST:,} layouts; name a mesh, as --mesh tensor=8")


def _meshes(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, pipeline, context, expert): those named, else all that divide."""
    if asked.mesh is not None:
        yield asked.mesh
        return
    node = cluster.groups[0].node
    for t in _divisors(math.gcd(node, shape.heads)):
        for p in _divisors(cluster.count // t):
            if p <= shape.layers and p <= 64:
                data = cluster.count // (t * p)
                experts = _divisors(math.gcd(shape.experts, data)) if shape.experts else (1,)
                for e in experts:
                    yield t, p, 1, e


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _layout(
    shape: Shape, asked: Asked, count: int, mesh: tuple[int, int, int, int],
    rest: tuple[int, Recompute, int, int],
) -> Layout | None:  # fmt: skip
    """One, or None where it could not run."""
    t, p, c, e = mesh
    rows, recompute, zero, chunks = rest
    data = count // (t * p * c)
    if count % (t * p * c) or data < 1 or asked.batch % (rows * data):
        return None
    m = asked.batch // (rows * data)
    if chunks > 1 and (p == 1 or shape.layers % (p * chunks) or m % p):
        return None
    copies = data * c
    if (zero and copies == 1) or (zero == 3 and p > 1):
        return None
    return Layout(
        count, rows, asked.batch, asked.sequence, STACK, t, p, c, e, chunks, recompute,
        asked.precision, copies if zero == 3 else 1, False, copies if zero else 1,
        STACK.attention, t > 1,
    )  # fmt: skip


def forecast(
    shape: Shape, made: Sequence[Layout], cluster: Cluster, held: Sequence[Memory], room: int
) -> list[Planned]:
    """Layouts with their seconds, the fastest first."""
    counted: list[Terms] = [terms(shape, layout, cluster) for layout in made]
    device = cluster.groups[0].device
    batch = batch_of(counted, [tags(shape, layout, device.name) for layout in made])
    model, constants = Model.of(batch), fitted()
    values = model.read(constants.values)
    seconds = model.seconds(batch, values)
    total = seconds.total
    seen = published(device.name, made[0].precision)
    off = math.exp(constants.reach if seen else constants.far)
    found = []
    for i in np.argsort(total, kind="stable"):
        layout, value = made[i], float(total[i])
        tokens = float(layout.batch * layout.sequence)
        found.append(
            Planned(
                layout,
                value,
                value / off,
                value * off,
                model.lanes_of(batch, values, int(i)),
                held[i],
                room,
                COUNTS["causal"](shape, tokens, layout.sequence, False),
                Roofline(device).peak(layout.precision) * layout.devices,
            )
        )
    return found
