"""Strided tensors on the way to another worker: packed into one message, or block by block.

After TEMPI (Pearson et al., 2021). A tensor is brought to a canonical form, runs of contiguous
elements nested in (count, stride) levels, in which equal layouts written differently look alike.
Packing copies every byte once more at both ends; sending block by block pays for a message a block.
Which is quicker depends on the length of the blocks and on the machine, so both are measured once
and a model of these figures decides, alike at both ends.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from outsize.collectives.c10d import C10d
from outsize.errors import OutsizeError

Way = Literal["pack", "blocks"]
_BLOCKS = (64, 1 << 10, 16 << 10, 256 << 10, 4 << 20)  # bytes of runs that are measured
_TOTAL = 8 << 20  # bytes that are packed, or sent in one message, to measure
_MOST = 4096  # messages under way at once


@dataclass(frozen=True)
class Layout:
    """Runs of `run` contiguous elements; levels (count, stride in elements), outermost first."""

    run: int
    levels: tuple[tuple[int, int], ...]

    @property
    def runs(self) -> int:
        return prod(count for count, _ in self.levels)

    def starts(self) -> Iterator[int]:
        """The first element of every run, in the order of the tensor's elements."""
        for places in product(*(range(count) for count, _ in self.levels)):
            yield sum(p * stride for p, (_, stride) in zip(places, self.levels, strict=True))


def layout(shape: Sequence[int], strides: Sequence[int]) -> Layout:
    """The canonical form: dims of one element dropped, dims that continue each other folded."""
    if 0 in shape:
        return Layout(0, ())
    folded: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if folded and folded[-1][1] == count * stride:
            folded[-1] = (folded[-1][0] * count, stride)
        else:
            folded.append((count, stride))
    run = folded.pop()[0] if folded and folded[-1][1] == 1 else 1
    return Layout(run, tuple(folded))


@dataclass(frozen=True)
class Model:
    """Seconds of what a strided message is made of, measured between two workers.

    latency: of a message; byte: of one more byte in it; each: (bytes of a run, seconds of one of
    many such messages under way at once), by length; pack: (bytes of a run, seconds to pack or
    unpack a byte), by length.
    """

    latency: float
    byte: float
    each: tuple[tuple[int, float], ...]
    pack: tuple[tuple[int, float], ...]

    def seconds(self, way: Way, form: Layout, width: int) -> float:
        """What a tensor of elements of `width` bytes takes, from memory to memory."""
        run = form.run * width
        if way == "blocks":
            return self.latency + _between(self.each, run) * form.runs
        return self.latency + (self.byte + 2 * _between(self.pack, run)) * run * form.runs

    def way(self, form: Layout, width: int) -> Way:
        """The quicker one. Nothing is packed that already lies together."""
        if form.runs <= 1:
            return "blocks"
        ways: tuple[Way, Way] = ("pack", "blocks")
        return min(ways, key=lambda way: self.seconds(way, form, width))

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def parse_model(text: str) -> Model:
    """What `Model.text` wrote."""
    try:
        found = json.loads(text)
        pack = tuple((int(run), float(seconds)) for run, seconds in found["pack"])
        each = tuple((int(run), float(seconds)) for run, seconds in found["each"])
        return Model(float(found["latency"]), float(found["byte"]), each, pack)
    except (ValueError, KeyError, TypeError) as error:
        raise OutsizeError(
            f"a model of strided messages cannot be read ({type(error).__name__}: {error});"
            " expected the text of Model.text(): measure it again"
        ) from error


def send(group: C10d, peer: int, tensor: Tensor, way: Way) -> None:
    """A tensor of any strides to the worker at a place of the group, which says `receive`."""
    form = layout(tensor.shape, tensor.stride())
    if way == "pack":
        group.messages("strided", [(peer, tensor.contiguous())], [])
        return
    for some in _batches(tensor, form):
        group.messages("strided", [(peer, run) for run in some], [])


def receive(group: C10d, peer: int, tensor: Tensor, way: Way) -> None:
    """What that worker sends, into a tensor whose runs are as long as those of the tensor sent;
    packed, into any of as many elements. `way`: as there."""
    form = layout(tensor.shape, tensor.stride())
    if way == "pack":
        packed = tensor if tensor.is_contiguous() else torch.empty_like(
            tensor, memory_format=torch.contiguous_format
        )  # fmt: skip
        group.messages("strided", [], [(peer, packed)])
        if packed is not tensor:
            tensor.copy_(packed)
        return
    for some in _batches(tensor, form):
        group.messages("strided", [], [(peer, run) for run in some])


def measure_strided(group: C10d, rounds: int = 5) -> Model:
    """The model of the first two workers of the group, given to all of it. All call it."""
    figures = torch.zeros(2, len(_BLOCKS) + 1, dtype=torch.float64)
    if group.rank < 2:
        one, large = (_trip(group, 1, size, rounds) for size in (_BLOCKS[0], _TOTAL))
        counts = [min(max(_TOTAL // run, 2), 256) for run in _BLOCKS]
        trips = [_trip(group, n, run, rounds) for n, run in zip(counts, _BLOCKS, strict=True)]
        each = [max(t - one, 0.0) / (n - 1) for n, t in zip(counts, trips, strict=True)]
        figures[0] = torch.tensor([one, *each])
        figures[1] = torch.tensor(
            [max(large - one, 0.0) / _TOTAL, *(_packing(run, rounds) for run in _BLOCKS)]
        )
    (latency, *each), (byte, *pack) = group.broadcast(figures).tolist()
    return Model(
        latency,
        byte,
        tuple(zip(_BLOCKS, each, strict=True)),
        tuple(zip(_BLOCKS, pack, strict=True)),
    )


def _trip(group: C10d, count: int, size: int, rounds: int) -> float:
    """Seconds of `count` messages of `size` bytes at once, one way: half of there and back."""
    parts = list(torch.zeros(count, size, dtype=torch.uint8))
    peer, least = 1 - group.rank, float("inf")
    there = [(peer, part) for part in parts]
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for sending in (group.rank == 0, group.rank == 1):
            group.messages("strided", there if sending else [], [] if sending else there)
        least = min(least, time.perf_counter() - begin)
    return least / 2


def _packing(run: int, rounds: int) -> float:
    """Seconds to pack a byte that lies in runs of so many bytes, into memory that is new."""
    strided = torch.zeros(_TOTAL // run, 2 * run, dtype=torch.uint8)[:, :run]
    least = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        strided.contiguous()
        least = min(least, time.perf_counter() - begin)
    return least / _TOTAL


def _between(known: tuple[tuple[int, float], ...], run: int) -> float:
    """A figure by length, between the measured ones: on a line; beyond them: the nearest, or along
    the last two where it grows with the length."""
    at = min(max(bisect_left(known, (run, 0.0)), 1), len(known) - 1)
    (low, first), (high, last) = known[at - 1], known[at]
    share = max((run - low) / (high - low), 0.0)
    return first + (last - first) * (share if last > first else min(share, 1.0))


def _batches(tensor: Tensor, form: Layout) -> Iterator[list[Tensor]]:
    """The runs, as many at once as may be under way."""
    starts = list(form.starts())
    first = tensor.storage_offset()
    for at, end in pairwise([*range(0, len(starts), _MOST), len(starts)]):
        yield [
            tensor.detach().as_strided((form.run,), (1,), first + start) for start in starts[at:end]
        ]
