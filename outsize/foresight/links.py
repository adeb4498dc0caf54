"""Seconds of a collective over a group of ranks, on the levels of a cluster.

A group is so many ranks with a stride between neighbours; ranks fill nodes in order. Messages take
the better of a ring and a tree, the rule by which NCCL chooses: a ring of g moves (g - 1) / g of
the bytes at full bandwidth and waits g - 1 times, a tree moves them once and waits twice log2 g
times; what is not summed for all has rings alone (Thakur, Rabenseifner and Gropp, Optimization of
collective communication operations in MPICH, 2005). Where a group has k ranks on each node, k
adapters carry its bytes between nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from outsize.foresight.network import Network
from outsize.hardware import talking
from outsize.hardware.cluster import Group

# A ring's step inside a node waits for a flag in memory, one between nodes for an adapter: parts of
# the latency of a message that starts alone (NCCL 2.19, tuning.cc: by protocol 0.6 to 4 us over
# NVLink, 2.7 to 14 us over a network).
FLAG, HOP = 0.25, 0.5
Operation = Literal["all_reduce", "gather", "scatter", "send"]
# Passes over the bytes: an all-reduce is a scatter and a gather of the same bytes.
_PASSES = {"all_reduce": 2.0, "gather": 1.0, "scatter": 1.0}
_MEASURED = {"gather": "all_gather", "scatter": "reduce_scatter"}  # as a probe names them


@dataclass(frozen=True)
class Ranks:
    """Of a group: how many, how many of them on one node, and the levels that they talk over."""

    size: int
    inside: int
    rate: float = 0.0  # B/s of one of them to the next node; 0: as the outermost level has it

    @property
    def nodes(self) -> int:
        return -(-self.size // self.inside)


def ranks(size: int, stride: int, node: int, network: Network | None = None) -> Ranks:
    """A group of ranks that are `stride` apart on nodes of `node` devices. network: what was
    measured between the nodes."""
    inside = max(1, min(size, node // stride))
    return Ranks(size, inside, network.ring(size, stride) if network and size > inside else 0.0)


def seconds(
    operation: Operation, bytes_: float, group: Ranks, machines: Group, calls: float = 1
) -> float:
    """Of one collective, in so many calls, as measured where it was. bytes_: of the whole tensor,
    gathered or summed, on each rank; of send what is sent."""
    if group.size < 2 or not bytes_:
        return 0.0
    inner, outer = machines.levels[0], machines.levels[-1]
    one_node = group.nodes == 1
    table = inner.talked if one_node else outer.talked
    if table and not group.rate:
        name = _MEASURED.get(operation, operation)
        known = talking.seconds(table, name, bytes_ / calls, group.size, group.inside)
        if known is not None:
            return calls * known
    if operation == "send":
        level = inner if one_node else outer
        return bytes_ / (group.rate or level.bandwidth.value) + level.latency.value
    passes = _PASSES[operation]
    outside = group.rate or outer.bandwidth.value
    wide, wait = inner.bandwidth.value, inner.latency.value
    near = passes * (group.size - group.nodes) * wait * FLAG + wait
    far = 0.0
    if not one_node:
        wide = min(wide, group.inside * outside)
        far = passes * (group.nodes - 1) * outer.latency.value * HOP
    moved = passes * bytes_ / wide
    ring = moved * (group.size - 1) / group.size + calls * (near + far)
    if operation != "all_reduce":
        return ring
    waits = 2 * outer.latency.value * math.log2(group.nodes) if group.nodes > 1 else wait
    return min(ring, moved + calls * (waits + 2 * wait * math.log2(group.inside or 1) / 2))


def exchange(bytes_: float, copies: int, group: Ranks, machines: Group) -> float:
    """Seconds until each rank's tokens are at `copies` random ranks. bytes_: of the tokens, once.

    A token goes to a node once, over an adapter, and is copied there (DeepEP, 2025); the nodes that
    so many draws meet are n (1 - (1 - 1/n)^copies)."""
    if group.size < 2 or not bytes_:
        return 0.0
    inner, outer = machines.levels[0], machines.levels[-1]
    near = bytes_ * copies * (group.inside - 1) / group.inside / inner.bandwidth.value
    met = (group.nodes - 1) * (1 - (1 - 1 / group.nodes) ** copies)
    far = bytes_ * met / (group.rate or outer.bandwidth.value)
    wait = inner.latency.value if group.nodes == 1 else outer.latency.value
    return max(near, far) + wait
