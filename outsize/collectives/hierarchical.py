"""Collectives over several hosts with as many ranks each: inside the hosts, then between them.

A reduction is scattered inside every host, so that each rank goes on with one part of it; ranks of
the same place on all hosts finish that part among themselves. What crosses the network is then
(h - 1) / h of the bytes a host and direction, for h hosts, however many ranks a host has.
bfloat16 and float16 travel as float32, since they are summed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from outsize.collectives.collective import (
    DONE,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Collective,
    Handle,
    Operation,
    ReduceScatter,
    Span,
    even,
    length,
)
from outsize.collectives.pieces import flattened, wider


class Hierarchical(Collective):
    """hosts: the places of the group's workers, host by host, as many on each; rank: this one's
    place. inner: the group of this host, outer: of this place on every host; both in that order.
    flat: makes the group of all, which alone exchanges all to all; by all at their first call.
    The two levels wait for one another: an operation is over when `start` returns."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        inner: Collective,
        outer: Collective,
        flat: Callable[[], Collective],
    ) -> None:
        self.rank, self.size = rank, len(hosts) * len(hosts[0])
        self.inner, self.outer = inner, outer
        self.received = Counter()
        self._hosts, self._make, self._flat = hosts, flat, list[Collective]()

    def through(self, way: Callable[[Collective], Collective]) -> Hierarchical:
        """The same over what `way` makes of the groups of both levels."""
        return Hierarchical(self.rank, self._hosts, way(self.inner), way(self.outer), self._make)

    def start(self, call: Call) -> Handle:
        if isinstance(call, AllToAll):
            if not self._flat:
                self._flat.append(self._make())
            self.count(call)
            return self._flat[0].start(call)
        call.had(self.size, self.rank)  # checks it; the levels count
        before = self._bytes()
        match call:
            case AllReduce(tensor, operation):
                self._all_reduce(tensor, operation)
            case ReduceScatter(flat, spans, out):
                self._reduce_scatter(flat, spans, out)
            case AllGather(mine, spans, out):
                self._all_gather(mine, spans, out)
            case Broadcast(tensor, source):
                self._broadcast(tensor, source)
            case _:
                self.inner.barrier()
                self.outer.barrier()
                self.inner.barrier()
        if had := self._bytes() - before:
            self.received[call.name] += had
        return DONE

    def _all_reduce(self, tensor: Tensor, operation: Operation) -> None:
        flat, back = flattened(tensor)
        if operation == "max":
            self.outer.all_reduce(self.inner.all_reduce(flat, "max"), "max")
        else:
            wide = flat.to(wider(flat.dtype))
            spans = even(wide.numel(), self.inner.size)
            mine = wide[slice(*spans[self.inner.rank])]
            self.inner.reduce_scatter(wide, spans, mine)
            self.outer.all_reduce(mine)
            self.inner.all_gather(mine, spans, wide)
            if wide is not flat:
                flat.copy_(wide)
        back()

    def _reduce_scatter(self, flat: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        order, inner, outer = self._order(spans)
        packed = torch.cat([flat[slice(*spans[place])] for place in order])
        packed = packed.to(wider(flat.dtype))
        mine = packed[slice(*inner[self.inner.rank])]
        self.inner.reduce_scatter(packed, inner, mine)
        result = mine[slice(*outer[self.outer.rank])]
        self.outer.reduce_scatter(mine, outer, result)
        out.copy_(result)

    def _all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        order, inner, outer = self._order(spans)
        packed = out.new_empty(inner[-1][1])
        part = packed[slice(*inner[self.inner.rank])]
        self.outer.all_gather(mine, outer, part)
        self.inner.all_gather(part, inner, packed)
        places = zip(order, packed.split([length(spans[p]) for p in order]), strict=True)
        for place, piece in places:
            out[slice(*spans[place])] = piece

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        host = next(h for h, places in enumerate(self._hosts) if source in places)
        place = self._hosts[host].index(source)
        if self.inner.rank == place:
            self.outer.broadcast(tensor, host)
        self.inner.broadcast(tensor, place)

    def _order(
        self, spans: Sequence[Span]
    ) -> tuple[tuple[int, ...], tuple[Span, ...], tuple[Span, ...]]:
        """The group's places in the order of their parts here: those of the first rank of every
        host, of the second, ...; the spans of these runs; the spans in this worker's own run."""
        runs = [[places[i] for places in self._hosts] for i in range(self.inner.size)]
        inner = _laid(sum(length(spans[p]) for p in run) for run in runs)
        outer = _laid(length(spans[p]) for p in runs[self.inner.rank])
        return tuple(p for run in runs for p in run), inner, outer

    def _bytes(self) -> int:
        return sum(self.inner.received.values()) + sum(self.outer.received.values())


def own(group: Collective) -> Mapping[str, int]:
    """What a group has had, less what groups inside it count."""
    if isinstance(group, Hierarchical):
        return {"all_to_all": group.received.get("all_to_all", 0)}
    return group.received


def _laid(lengths: Iterator[int]) -> tuple[Span, ...]:
    """Spans of such lengths one after another."""
    return tuple(pairwise(accumulate(lengths, initial=0)))
