"""The `Collective` seam: what the workers of one group say to one another.

All collectives sum; who needs a mean divides, once, by a global count. Every worker of the group
calls the same operations in the same order, from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

Operation = Literal["sum", "max"]
Span = tuple[int, int]  # elements [first, last) of a flat tensor


class Collective(Protocol):
    """Communication among the workers of one group. All operations block the calling thread."""

    @property
    def size(self) -> int:
        """Workers of the group."""

    @property
    def rank(self) -> int:
        """The place of this worker in it, from 0."""

    @property
    def received(self) -> Mapping[str, int]:
        """Bytes that this worker has had from others so far, by the operation's name; a worker
        sends as many on average. What the formulas give: 2 (n - 1) / n of the bytes for an
        all-reduce, (n - 1) / n for a reduce-scatter or an all-gather."""

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        """The sum (or largest) of everybody's `tensor`, in place; gives `tensor`. The bits are
        the same on every worker."""

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        """out = the sum over the workers of flat[spans[rank]]. flat: 1-D, of one length everywhere;
        out: as long as the own span, may be that very part of flat (the rest of flat may then be
        overwritten). spans: by worker, disjoint; they may be of different lengths, or empty."""

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        """out[spans[r]] = worker r's `mine`, for every r. mine may be that part of out."""

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """out[r] = what worker r gave for this one. Contiguous tensors of one dtype; shapes are
        agreed upon beforehand."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of one worker of the group, in place; gives `tensor`."""

    def barrier(self) -> None:
        """Returns when every worker has come here."""


class Alone:
    """The group of one worker."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.received: Mapping[str, int] = {}

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        return tensor

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        self.all_gather(flat[slice(*spans[0])], ((0, len(out)),), out)

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        here = out[slice(*spans[0])]
        if here.data_ptr() != mine.data_ptr():
            here.copy_(mine)

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        out[0].copy_(given[0])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def barrier(self) -> None:
        return None
