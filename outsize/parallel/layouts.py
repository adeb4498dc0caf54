"""Layouts: how one tensor lies on the workers of one mesh axis, as types.

A tensor at the boundary of a module has a layout for its value and one for its gradient. They are
the S, B and P of OneFlow (Yuan et al., 2021):

    Replicated       the same on every worker (B)
    Sharded(dim)     each worker has its part of a dim (S)
    Partial          each worker has a summand; their sum is the tensor (P)

The gradient's layout follows by transposition: of what is sharded it is sharded, of a summand it is
replicated, and of what is replicated it is replicated where all workers do the same with it and
partial where each goes on with a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.parallel.shards import even


@dataclass(frozen=True)
class Replicated:
    """The same on every worker."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Sharded:
    """Each worker has its part of `dim` (counted from 0).

    segments: lengths that follow one another along the dim, each of which is cut over the workers
    by itself: a fused weight of queries, keys and values holds three. Empty: the dim is one.
    copies: neighbours that have the same part, where there are fewer parts than workers; each has a
    summand of its gradient.
    """

    dim: int
    segments: tuple[int, ...] = ()
    copies: int = 1

    def __str__(self) -> str:
        inner = f", {len(self.segments)} segments" if self.segments else ""
        return f"sharded({self.dim}{inner}{f', {self.copies} copies' if self.copies > 1 else ''})"

    def at(self, dim: int) -> Sharded:
        """The same cut of another dim of this length."""
        return Sharded(dim, self.segments, self.copies)

    def lengths(self, size: int) -> tuple[int, ...]:
        """The segments of a dim of `size`."""
        return self.segments or (size,)


@dataclass(frozen=True)
class Partial:
    """Each worker has a summand."""

    def __str__(self) -> str:
        return "partial"


Layout = Replicated | Sharded | Partial
REPLICATED, PARTIAL = Replicated(), Partial()


def sharded(dim: int, segments: Sequence[int] = (), copies: int = 1) -> Sharded:
    """A cut of `dim`; one segment alone is none."""
    return Sharded(dim, tuple(segments) if len(segments) > 1 else (), copies)


@dataclass(frozen=True)
class Laid:
    """Layouts of a tensor's value and of its gradient."""

    value: Layout = REPLICATED
    gradient: Layout = REPLICATED

    def __post_init__(self) -> None:
        if not paired(self.value, self.gradient):
            raise OutsizeError(
                f"layout: a value that is {self.value} has a gradient that is {dual(self.value)}"
                f"{' or partial' if self.value == REPLICATED else ''}; got {self.gradient}"
            )

    def __str__(self) -> str:
        return f"{self.value} with {self.gradient} gradient"


def dual(value: Layout) -> Layout:
    """The layout of the gradient, where nothing is left to be summed."""
    return value if isinstance(value, Sharded) else REPLICATED


def paired(value: Layout, gradient: Layout) -> bool:
    """Whether a gradient can lie so where the value lies so."""
    return gradient == dual(value) or (value == REPLICATED and gradient == PARTIAL)


@dataclass(frozen=True)
class Exchange:
    """A change of layouts in the direction of the forward pass: `before` becomes `after`; in the
    backward pass the gradient goes from after.gradient to before.gradient."""

    before: Laid
    after: Laid

    @property
    def names(self) -> tuple[str, str]:
        """What runs (forward, backward)."""
        forward = operation(self.before.value, self.after.value)
        return forward, operation(self.after.gradient, self.before.gradient)

    def __str__(self) -> str:
        return "{} forward, {} backward".format(*self.names)


def operation(source: Layout, target: Layout) -> str:
    """What turns one layout into another. Nothing is sent by "none", "take" (each worker its own
    part of what all have), "part" (the first worker keeps the value, the others zeros) and "place"
    (the own part among zeros)."""
    match source, target:
        case _ if source == target:
            return "none"
        case Replicated(), Sharded():
            return "take"
        case Replicated(), Partial():
            return "part"
        case Partial(), Replicated():
            return "all_reduce"
        case Partial(), Sharded():
            return "reduce_scatter"
        case Sharded(), Replicated():
            return "all_gather"
        case Sharded(), Partial():
            return "place"
        case _:
            return "all_to_all"


# What the workers of an axis do to the pass of a tensor: forward, backward.
SUM = Exchange(Laid(PARTIAL, REPLICATED), Laid())
FAN_OUT = Exchange(Laid(), Laid(REPLICATED, PARTIAL))


def spans(length: int, layout: Sharded, n: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The rows [first, last) of a dim of `length` that lie on a worker, a pair a segment."""
    pairs, start = [], 0
    for size in layout.lengths(length):
        offsets, at = even(start, start + size, n // layout.copies), rank // layout.copies
        pairs.append((offsets[at], offsets[at + 1]))
        start += size
    return tuple(pairs)


def local_size(length: int, layout: Sharded, n: int, rank: int) -> int:
    """Rows of a sharded dim of `length` that lie on a worker."""
    return sum(last - first for first, last in spans(length, layout, n, rank))


def part_of(whole: Tensor, layout: Layout, n: int, rank: int) -> Tensor:
    """What lies on a worker of a tensor that is whole here: a view where it is one segment."""
    if not isinstance(layout, Sharded):
        return whole
    cuts = spans(whole.shape[layout.dim], layout, n, rank)
    pieces = [whole.narrow(layout.dim, first, last - first) for first, last in cuts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)
