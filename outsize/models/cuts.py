"""Cut: which part of a parameter lies on one worker of a mesh, and its gradient's kind, by axis."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]  # rows [first, last)


class Copies(NamedTuple):
    """How many neighbours on an axis hold the same elements (1: nobody else; the axis' size: all).
    The axis falls into runs of so many neighbours. partial: each of them has a part of the
    gradient, and their sum is the gradient; else each has the whole of it."""

    axis: str
    holders: int
    partial: bool


@dataclass(frozen=True)
class Cut:
    """Along an axis of the mesh. shape: of what is cut, the whole parameter or what `outer`, its
    cut along another axis, leaves of it. dim: along which it is cut, None: whole on every worker.
    spans: the rows of that dim that lie here, one span behind the other; of a weight that fuses
    several layers (queries, keys and values) a span of each. Every worker has as many spans.

    shared, partial: see Copies. On an axis that no cut names and that cuts no stages, all workers
    hold the same; where such an axis cuts the batch, each has a part of the gradient.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    spans: tuple[Span, ...] = ()
    shared: int = 1
    partial: bool = False
    axis: str = "tensor"
    outer: Cut | None = None

    @property
    def levels(self) -> tuple[Cut, ...]:
        """The cuts along one axis each, that of the whole parameter first."""
        return (self,) if self.outer is None else (*self.outer.levels, replace(self, outer=None))

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.levels[0].shape

    @property
    def copies(self) -> tuple[Copies, ...]:
        """Who else has what lies here, level by level."""
        return tuple(Copies(cut.axis, cut.shared, cut.partial) for cut in self.levels)

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """The views of what is cut (or of a state of its shape) that lie here."""
        if self.dim is None:
            return [whole]
        return [whole.narrow(self.dim, first, last - first) for first, last in self.spans]

    def of(self, whole: Tensor) -> Tensor:
        """What lies here of a whole parameter (or of a state of its shape): a view, or where there
        are several spans a copy."""
        whole = whole if self.outer is None else self.outer.of(whole)
        pieces = self.pieces(whole)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim or 0)

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Write what lies here to its places in what is cut."""
        if self.dim is None:
            whole.copy_(local)
            return
        parts = local.split([last - first for first, last in self.spans], self.dim)
        for piece, part in zip(self.pieces(whole), parts, strict=True):
            piece.copy_(part)

    def runs(self) -> list[Span]:
        """The elements [first, last) of the whole parameter, flat, that lie here, in the order in
        which they do."""
        made = [(0, prod(self.shape))] if self.outer is None else self.outer.runs()
        if self.dim is None:
            return made
        row = prod(self.shape[self.dim + 1 :])
        block = row * self.shape[self.dim]
        starts = range(0, prod(self.shape), block)
        mine = [(at + a * row, at + b * row) for at in starts for a, b in self.spans]
        return list(chain.from_iterable(inside(made, *run) for run in mine))

    @property
    def size(self) -> int:
        """Rows of the dim that it is cut along."""
        return sum(last - first for first, last in self.spans)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        return tuple(self.size if i == self.dim else n for i, n in enumerate(self.shape))


def inside(runs: Sequence[Span], first: int, last: int) -> Iterator[Span]:
    """What elements [first, last) of these runs, put one behind the other, are parts of."""
    ends = list(accumulate(b - a for a, b in runs))
    for index in range(bisect_right(ends, first), len(runs)):
        (a, b), end = runs[index], ends[index]
        yield max(a, b - (end - first)), min(b, b - (end - last))
        if ends[index] >= last:
            return


NO_CUTS: Mapping[str, Cut] = MappingProxyType({})  # every parameter is whole here
