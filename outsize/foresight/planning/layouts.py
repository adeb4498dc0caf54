"""Layouts that could carry out what is asked: cells of a mesh and rows, and variants of each.

A cell fixes how many devices take part, the mesh and the rows of a microbatch; its variants differ
in what is sharded, recomputed, cut into chunks, and in how norms lie over the tensor axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from outsize.foresight.layout import Layout, Recompute, Stack
from outsize.foresight.planning.asked import EXPERTS, TOKENS, Asked, Value
from outsize.foresight.resting import ways
from outsize.foresight.shape import Shape
from outsize.hardware.cluster import Cluster
from outsize.hardware.resize import fewer, resized

# Our own trainer (outsize.plan.Precision): gradients, the master copy and both moments in float32;
# sums of gradients run beside the last backward passes; attention keeps what it gathered.
STACK = Stack(
    "outsize", gradients=4, optimizer=12, fused=False, norms=True, scattered=True, keys_whole=True,
    in_place=True,
)  # fmt: skip
WIDE = replace(STACK, weights=4, optimizer=8)  # in float32, where parameters are the master copy
ROWS = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 4)
STAGES = 64  # of a pipeline, at most
SHORTEST = 2048  # tokens of a worker, below which a sequence is not cut by itself


@dataclass(frozen=True)
class Cell:
    """One cluster, mesh and number of rows. base: its layout with nothing sharded or recomputed,
    one chunk, norms cut over the tensor axis."""

    cluster: Cluster
    base: Layout


def cells(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[Cell]:
    """All of them, on every number of devices that may be taken."""
    for count in sizes(cluster, asked):
        part = resized(cluster, count)
        for t, p, c, e in _meshes(shape, asked, part):
            data = count // (t * p * c)
            if not asked.conditions.allow("data", data):
                continue
            for rows in asked.conditions.among("rows", ROWS):
                assert isinstance(rows, int)
                m, left = divmod(asked.batch, rows * data)
                if m >= p and not left and asked.conditions.allow("microbatches", m):
                    yield Cell(part, _base(asked, count, (t, p, c, e), rows))


def _base(asked: Asked, count: int, mesh: tuple[int, int, int, int], rows: int) -> Layout:
    t, p, c, e = mesh
    stack = WIDE if asked.precision == "fp32" else STACK
    return Layout(
        count, rows, asked.batch, asked.sequence, stack, t, p, c, e, precision=asked.precision,
        attention=stack.attention, sequence_parallel=t > 1, seen=asked.lengths.seen,
    )  # fmt: skip


def sizes(cluster: Cluster, asked: Asked) -> tuple[int, ...]:
    """Numbers of devices that may be taken: all, or fewer where that is asked for or may be less.
    Unlike devices are taken whole."""
    most = min(asked.devices or cluster.count, cluster.count)
    about = any(
        one.name == "devices" for one in (*asked.conditions.required, *asked.conditions.forbidden)
    )
    if asked.objective == "time" and most == cluster.count and not about:
        return (cluster.count,)
    node = cluster.groups[0].node
    whole = most if most < node else most - most % node
    found = sorted({whole, *(n for n in fewer(cluster) if n <= most)})
    return tuple(n for n in found if asked.conditions.allow("devices", n))


def _meshes(shape: Shape, asked: Asked, cluster: Cluster) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, pipeline, context, expert): those that divide and are allowed."""
    count, node = cluster.count, cluster.groups[0].node
    among = asked.conditions.among
    for t in among("tensor", divisors(math.gcd(node, shape.heads))):
        for p in among("pipeline", (p for p in divisors(count) if p <= min(shape.layers, STAGES))):
            for c in among(TOKENS, _cuts(asked.sequence)):
                if not _divides(count, shape, t, p, c):
                    continue
                data = count // (int(t) * int(p) * int(c))
                usual = divisors(math.gcd(shape.experts, data)) if shape.experts else (1,)
                for e in among(EXPERTS, usual):
                    if (e == 1 or shape.experts) and data % int(e) == 0:
                        yield int(t), int(p), int(c), int(e)


def _divides(count: int, shape: Shape, t: Value, p: Value, c: Value) -> bool:
    t, p, c = int(t), int(p), int(c)
    return count % (t * p * c) == 0 and shape.heads % t == 0 and p <= shape.layers


def _cuts(sequence: int) -> tuple[int, ...]:
    """Parts of a sequence that leave every worker enough of it."""
    found = [1]
    while sequence % (found[-1] * 2) == 0 and sequence // (found[-1] * 2) >= SHORTEST:
        found.append(found[-1] * 2)
    return tuple(found)


def divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys((*low, *(number // n for n in reversed(low)))))


def variants(shape: Shape, asked: Asked, cell: Cell) -> Iterator[Layout]:
    """Of a cell, with nothing or everything recomputed; what lies between depends on the room."""
    base, among = cell.base, asked.conditions.among
    chunks = [v for v in among("chunks", CHUNKS) if _chunked(shape, base, int(v))]
    kinds: tuple[Recompute, ...] = ("none", "full")
    for chunk, (zero, over), sequence in product(chunks, _sharded(asked, cell), norms(asked, cell)):
        spread = replace(
            base,
            chunks=int(chunk),
            shards=over if zero == 3 else 1,
            states=over if zero else 1,
            sequence_parallel=bool(sequence),
        )
        below = ways(spread, cell.cluster)
        if shape.module is not None and (base.tensor > 1 or shape.module.native):
            below = iter((spread,))  # whose parts stay on the device
        for layout, recompute in product(below, kinds):
            yield replace(layout, recompute=recompute)


def norms(asked: Asked, cell: Cell) -> tuple[bool, ...]:
    """Whether norms are cut over the tensor axis."""
    usual = (1, 0) if cell.base.tensor > 1 else (0,)
    return tuple(bool(v) for v in usual if asked.conditions.allow("sequence-parallel", v))


def _chunked(shape: Shape, base: Layout, chunks: int) -> bool:
    if chunks == 1:
        return True
    whole = shape.layers % (base.pipeline * chunks) == 0
    return base.pipeline > 1 and whole and base.microbatches % base.pipeline == 0


def _sharded(asked: Asked, cell: Cell) -> Iterator[tuple[int, int]]:
    """(stage of ZeRO, over how many workers): over the data axis, or those of one machine."""
    base = cell.base
    copies = base.data // base.expert if asked.carried_out else base.data
    for zero in asked.conditions.among("zero", (0, 1, 3)):
        if zero == 0:
            if asked.conditions.allow("shards", 1):
                yield 0, 1
            continue
        if copies == 1 or (zero == 3 and base.pipeline > 1):
            continue
        near = cell.cluster.groups[0].node // base.tensor
        degrees = {copies, near} if 1 < near < copies and copies % near == 0 else {copies}
        for over in asked.conditions.among("shards", sorted(degrees, reverse=True)):
            cut = int(over)
            if cut > 1 and copies % cut == 0 and cut % base.expert == 0:
                yield int(zero), cut
