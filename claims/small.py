"""All-reduces of few bytes, where messages cost more than bytes; and which one to take when.

doubling: in round k everyone trades all of it with the worker whose number differs in bit k: log2 n
messages one after another instead of a ring's 2 (n - 1). Between hosts, under a reduce-scatter
inside them, it is NVRAR (Singhania et al., "LLM Inference Beyond a Single Node", 2025):
`Hierarchical(inner, Chosen(outer, table))`.
star: everyone to one worker and back, two messages one after another, for links whose latency is
all that counts (Li et al., "TPI-LLM", 2024).
ring: the transport's own, least bytes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from outsize.collectives.c10d import C10d
from outsize.collectives.collective import DONE, AllReduce, Call, Collective, Handle, Operation
from outsize.collectives.pieces import flattened, joined, wider
from outsize.errors import OutsizeError

Message = tuple[int, Tensor]  # a worker, what is sent or where it is put
Algorithm = Callable[[C10d, Tensor, Operation], None]  # in place, on a 1-D tensor
SIZES = (256, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)  # bytes


def doubling(group: C10d, flat: Tensor, operation: Operation) -> None:
    """Recursive doubling. The workers beyond the largest power of two give theirs to one below and
    get the result. Both sides of a trade add the same two numbers: the bits are the same."""
    most = 1 << (group.size.bit_length() - 1)
    rank, mine = group.rank, flat.to(wider(flat.dtype))
    if rank >= most:
        _trade(group, [(rank - most, mine)], []).wait()
        _trade(group, [], [(rank - most, mine)]).wait()
    else:
        beyond = [rank + most] if rank + most < group.size else []
        peers = [rank ^ (1 << bit) for bit in range(most.bit_length() - 1)]
        _add_up(group, mine, beyond, peers, operation)
        _trade(group, [(peer, mine) for peer in beyond], []).wait()
    if mine is not flat:
        flat.copy_(mine)


def _add_up(
    group: C10d, mine: Tensor, beyond: list[int], peers: list[int], operation: Operation
) -> None:
    """Take from those beyond, then trade with one peer after another."""
    come = [(peer, torch.empty_like(mine)) for peer in (*beyond, *peers)]
    early = [_trade(group, [], [one]) for one in come] if group.early else []
    for at, (peer, theirs) in enumerate(come):
        sent = [] if peer in beyond else [(peer, mine)]
        _trade(group, sent, [] if early else [(peer, theirs)]).wait()
        if early:
            early[at].wait()
        joined(mine, theirs, operation)


def _trade(group: C10d, sent: list[Message], had: list[Message]) -> Handle:
    """Messages under way, counted."""
    group.received["all_reduce"] += sum(tensor.nbytes for _, tensor in had)
    return group.post("all_reduce", sent, had)


def star(group: C10d, flat: Tensor, operation: Operation) -> None:
    """Everyone's to the first worker, which adds them in the order of ranks and sends the result
    to all."""
    others = range(1, group.size)
    if group.rank:
        _trade(group, [(0, flat)], []).wait()
        _trade(group, [], [(0, flat)]).wait()
        return
    parts = flat.new_empty(group.size - 1, flat.numel())
    _trade(group, [], [(peer, parts[peer - 1]) for peer in others]).wait()
    total = flat.to(wider(flat.dtype))
    for part in parts:
        joined(total, part, operation)
    if total is not flat:
        flat.copy_(total)
    _trade(group, [(peer, flat) for peer in others], []).wait()


def ring(group: C10d, flat: Tensor, operation: Operation) -> None:
    """The group's own."""
    group.all_reduce(flat, operation)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {"ring": ring, "doubling": doubling, "star": star}
)


@dataclass(frozen=True)
class Row:
    """Seconds of an all-reduce of so many bytes by an algorithm."""

    algorithm: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Table:
    """What all-reduces take among `size` workers, measured. The same on all of them."""

    size: int
    rows: tuple[Row, ...]

    def seconds(self, algorithm: str, count: int) -> float:
        """Between the measured sizes, and beyond them along the last two."""
        known = sorted((r.bytes, r.seconds) for r in self.rows if r.algorithm == algorithm)
        at = min(max(bisect_left(known, (count, 0.0)), 1), len(known) - 1)
        (low, first), (high, last) = known[at - 1], known[at]
        return max(first + (last - first) * (count - low) / (high - low), 0.0)

    def best(self, count: int) -> str:
        """The quickest algorithm for so many bytes."""
        names = sorted({row.algorithm for row in self.rows})
        return min(names, key=lambda name: (self.seconds(name, count), name))


def measure(group: C10d, sizes: Sequence[int] = SIZES, rounds: int = 5) -> Table:
    """The table of a group: least seconds of the rounds, of the slowest worker. All call it."""
    rows = [
        Row(name, size, _least(group, algorithm, size, rounds))
        for size in sizes
        for name, algorithm in ALGORITHMS.items()
    ]
    slowest = group.all_reduce(torch.tensor([r.seconds for r in rows], dtype=torch.float64), "max")
    return Table(
        group.size,
        tuple(Row(r.algorithm, r.bytes, s) for r, s in zip(rows, slowest.tolist(), strict=True)),
    )


def _least(group: C10d, algorithm: Algorithm, size: int, rounds: int) -> float:
    flat, least = torch.zeros(max(size // 4, 1)), float("inf")
    for _ in range(rounds + 1):  # the first makes connections and buffers
        group.barrier()
        begin = time.perf_counter()
        algorithm(group, flat, "sum")
        least = min(least, time.perf_counter() - begin)
    return least


class Chosen(Collective):
    """A group whose all-reduces take the algorithm that a table of it says is quickest."""

    def __init__(self, group: C10d, table: Table) -> None:
        if table.size != group.size:
            raise OutsizeError(
                f"a table of collectives among {table.size} workers for a group of {group.size};"
                " measure it again"
            )
        self.group, self.table = group, table
        self.size, self.rank, self.received = group.size, group.rank, group.received

    def start(self, call: Call) -> Handle:
        if not isinstance(call, AllReduce):
            return self.group.start(call)
        flat, back = flattened(call.tensor)
        ALGORITHMS[self.table.best(flat.nbytes)](self.group, flat, call.operation)
        back()
        return DONE
