"""The `Collective` seam: what the workers of one group say to one another.

An operation is a value. `start` begins it and gives a handle, to wait for before its tensors are
used again; the methods that have the operations' names start one and wait for it. A transport has
`start` alone. All collectives sum; who needs a mean divides, once, by a global count. Every worker
of the group starts the same operations in the same order, from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from outsize.torch_private import tree_map_only

Operation = Literal["sum", "max"]
Span = tuple[int, int]  # elements [first, last) of a flat tensor
Name = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"]


class Handle:
    """An operation under way."""

    def __init__(self, rest: Callable[[], object] | None = None) -> None:
        """rest: what ends it; None for one that is done."""
        self._rest = rest

    def wait(self) -> None:
        """Before its tensors are used. The caller waits, on an accelerator its stream."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()


DONE = Handle()


class _Said:
    """What all operations have."""

    @property
    def device(self) -> torch.device | None:
        """Where its tensors are; None where it has none."""
        first = next(iter(vars(self).values()), None)
        return None if first is None else (first if isinstance(first, Tensor) else first[0]).device

    def mapped(self, way: Callable[[Tensor], Tensor]) -> Self:
        """The operation with other tensors."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return replace(self, **tree_map_only(Tensor, way, found))  # type: ignore[type-var]


@dataclass(frozen=True)
class AllReduce(_Said):
    """The sum (or largest) of everybody's tensor, in place; the same bits on every worker."""

    tensor: Tensor
    operation: Operation = "sum"
    name: ClassVar[Name] = "all_reduce"

    def had(self, size: int, rank: int) -> int:
        spans = even(self.tensor.numel(), size)
        numel = (size - 1) * length(spans[rank]) + self.tensor.numel() - length(spans[rank])
        return numel * self.tensor.element_size()


@dataclass(frozen=True)
class ReduceScatter(_Said):
    """out = the sum over the workers of flat[spans[rank]]. flat: 1-D, of one length everywhere;
    out: as long as the own span, may be that very part of flat (the rest of flat may then be
    overwritten). spans: by worker, disjoint; they may be of different lengths, or empty."""

    flat: Tensor
    spans: Sequence[Span]
    out: Tensor
    name: ClassVar[Name] = "reduce_scatter"

    def had(self, size: int, rank: int) -> int:
        _fit(self, size, self.out, self.spans[rank], self.flat)
        return (size - 1) * self.out.nbytes


@dataclass(frozen=True)
class AllGather(_Said):
    """out[spans[r]] = worker r's `mine`, for every r. mine may be that part of out."""

    mine: Tensor
    spans: Sequence[Span]
    out: Tensor
    name: ClassVar[Name] = "all_gather"

    def had(self, size: int, rank: int) -> int:
        _fit(self, size, self.mine, self.spans[rank], self.out)
        return sum(map(length, self.spans)) * self.out.element_size() - self.mine.nbytes


@dataclass(frozen=True)
class AllToAll(_Said):
    """out[r] = what worker r gave for this one. Contiguous tensors of one dtype; shapes are agreed
    upon beforehand."""

    given: Sequence[Tensor]
    out: Sequence[Tensor]
    name: ClassVar[Name] = "all_to_all"

    def had(self, size: int, rank: int) -> int:
        assert len(self.given) == len(self.out) == size, "one tensor for and from every worker"
        return sum(x.nbytes for r, x in enumerate(self.out) if r != rank)


@dataclass(frozen=True)
class Broadcast(_Said):
    """The tensor of one worker of the group, in place."""

    tensor: Tensor
    source: int = 0
    name: ClassVar[Name] = "broadcast"

    def had(self, size: int, rank: int) -> int:
        return 0 if rank == self.source else self.tensor.nbytes


@dataclass(frozen=True)
class Barrier(_Said):
    """Over when every worker has come here."""

    name: ClassVar[Name] = "barrier"

    def had(self, size: int, rank: int) -> int:
        return 0


Call = AllReduce | ReduceScatter | AllGather | AllToAll | Broadcast | Barrier


class Collective(ABC):
    """Communication among the workers of one group. size: of them; rank: the place of this one,
    from 0. received: bytes that this worker has had from others so far, by the operation's name; a
    worker sends as many on average. What the formulas give: 2 (n - 1) / n of the bytes for an
    all-reduce, (n - 1) / n for a reduce-scatter or an all-gather."""

    size: int
    rank: int
    received: Counter[str]

    @abstractmethod
    def start(self, call: Call) -> Handle:
        """Begin an operation. Its tensors are left alone until the handle has been waited for."""

    def count(self, call: Call) -> None:
        """Add what an operation brings. AssertionError where its parts do not fit together."""
        if had := call.had(self.size, self.rank):
            self.received[call.name] += had

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Tensor:
        """`AllReduce`; gives `tensor`."""
        self.start(AllReduce(tensor, operation)).wait()
        return tensor

    def reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        """`ReduceScatter`."""
        self.start(ReduceScatter(flat, spans, out)).wait()

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        """`AllGather`."""
        self.start(AllGather(mine, spans, out)).wait()

    def all_to_all(self, given: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """`AllToAll`."""
        self.start(AllToAll(given, out)).wait()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """`Broadcast`; gives `tensor`."""
        self.start(Broadcast(tensor, source)).wait()
        return tensor

    def barrier(self) -> None:
        """`Barrier`."""
        self.start(Barrier()).wait()


class Alone(Collective):
    """The group of one worker."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.received = Counter()

    def start(self, call: Call) -> Handle:
        match call:
            case ReduceScatter(flat, spans, out):
                put(flat[slice(*spans[0])], out)
            case AllGather(mine, spans, out):
                put(mine, out[slice(*spans[0])])
            case AllToAll(given, out):
                out[0].copy_(given[0])
        return DONE


def even(numel: int, parts: int) -> tuple[Span, ...]:
    """Spans of parts as equal as they can be, without padding."""
    return tuple(pairwise(numel * i // parts for i in range(parts + 1)))


def length(span: Span) -> int:
    """Elements of a span."""
    return span[1] - span[0]


def put(part: Tensor, out: Tensor) -> None:
    """Copy a part to where it may lie already."""
    if out.data_ptr() != part.data_ptr():
        out.copy_(part)


def _fit(call: ReduceScatter | AllGather, size: int, part: Tensor, own: Span, all_: Tensor) -> None:
    """Assert that spans, a worker's own part and the whole fit together."""
    name, spans = call.name, call.spans
    assert len(spans) == size, f"{name}: {len(spans)} spans for {size} workers"
    assert part.numel() == length(own), (
        f"{name}: a part of {part.numel()} elements for the span {own}"
    )
    assert all(0 <= first <= last <= all_.numel() for first, last in spans), (
        f"{name}: spans {spans} in a tensor of {all_.numel()} elements"
    )
