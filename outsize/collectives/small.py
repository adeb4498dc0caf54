"""All-reduces between hosts of few bytes, where messages cost more than bytes.

doubling: in round k everyone trades all of it with the worker whose number differs in bit k: log2 n
messages one after another instead of a ring's 2 (n - 1). Under a reduce-scatter inside the hosts
(hierarchical.py) it is NVRAR (Singhania et al., "LLM Inference Beyond a Single Node", 2025).
star: everyone to one worker and back, two messages one after another, for links whose latency is
all that counts (Li et al., "TPI-LLM", 2024).
ring: the transport's own, least bytes.

Which is taken, a table of the group says (tables.py). Every worker has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from outsize.collectives.c10d import C10d
from outsize.collectives.collective import Handle, Operation
from outsize.collectives.pieces import joined, wider

Message = tuple[int, Tensor]  # a worker, what is sent or where it is put
Algorithm = Callable[[C10d, Tensor, Operation], None]  # in place, on a 1-D tensor


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
