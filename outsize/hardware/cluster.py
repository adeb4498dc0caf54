"""A cluster as data: groups of like devices, each a nest of levels from the chip outwards.

A level joins so many of the units of the level below; its bandwidth is that of one device, in one
direction. What joins unlike groups is the slowest of their outermost levels. A measured matrix of
pairwise rates, where there is one, goes before the levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from outsize.errors import OutsizeError
from outsize.hardware.hardware import Device, Hardware, Link, Rate, Slowed, Talked, Tier

# Seconds until the first byte of a message: NCCL's base latencies of a hop (its tuning.cc, 2.19)
# and what Calculon (Isaev et al., 2023) takes for networks.
NEAR, FAR = 10e-6, 20e-6


@dataclass(frozen=True)
class Level:
    """So many (`size`) units of the level below, joined. dims: of a torus, with product size.
    talked: collectives over it, measured."""

    name: str  # "board", "node", "domain", "cluster", or the fabric's
    size: int
    bandwidth: Rate
    latency: Rate
    shape: Literal["switched", "torus"] = "switched"
    dims: tuple[int, ...] = ()
    talked: tuple[Talked, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise OutsizeError(f"level {self.name}: size {self.size}, expected 1 or more")
        if (self.bandwidth.unit, self.latency.unit) != ("B/s", "s"):
            raise OutsizeError(f"level {self.name}: expected a bandwidth in B/s, a latency in s")
        if self.shape == "torus" and math.prod(self.dims) != self.size:
            dims = "x".join(map(str, self.dims))
            raise OutsizeError(f"level {self.name}: a torus {dims} of {self.size} chips")


@dataclass(frozen=True)
class Group:
    """Like devices. levels: from the innermost outwards; the last joins all of them."""

    device: Device
    levels: tuple[Level, ...]

    @property
    def count(self) -> int:
        """Its devices."""
        return math.prod(level.size for level in self.levels)

    @property
    def node(self) -> int:
        """Devices of one machine, or of one domain: what the innermost level joins."""
        return self.levels[0].size if self.levels else 1


@dataclass(frozen=True)
class Cluster:
    """Groups of devices; tiers beside them; rates: B/s between every two nodes, slowed: computing
    and talking by each other, both measured."""

    groups: tuple[Group, ...]
    tiers: tuple[Tier, ...] = ()
    rates: tuple[tuple[float, ...], ...] = ()
    source: str = "catalogue"
    slowed: Slowed | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise OutsizeError("a cluster without devices; expected at least one group")
        square(self.rates, self.nodes)

    @property
    def count(self) -> int:
        """All devices."""
        return sum(group.count for group in self.groups)

    @property
    def nodes(self) -> int:
        """All machines, or domains."""
        return sum(group.count // group.node for group in self.groups)

    @property
    def alike(self) -> bool:
        """Whether its devices are of one kind, and as fast."""
        return all(group.device == self.groups[0].device for group in self.groups)

    def placed(self, order: Sequence[int]) -> Cluster:
        """Its nodes in another order, which is that of the ranks on them."""
        if not self.rates:
            return self
        return replace(self, rates=tuple(tuple(self.rates[i][j] for j in order) for i in order))

    def hardware(self) -> Hardware:
        """It as the planner of one machine's kind has it: devices of the first group, a node of
        them with a link inside and one to the others. Raises OutsizeError for unlike devices."""
        if not self.alike:
            found = ", ".join(group.device.name for group in self.groups)
            raise OutsizeError(f"devices of this cluster are {found}; expected one kind")
        group = self.groups[0]
        links = []
        if group.node > 1:
            inner = group.levels[0]
            links.append(Link(inner.name, "devices", inner.bandwidth, inner.latency))
        if self.nodes > 1:
            outer = group.levels[-1]
            links.append(Link(outer.name, "nodes", outer.bandwidth, outer.latency))
        device = replace(group.device, count=group.node)
        own = Tier("device", device.memory_bytes, device.bandwidth, device.bandwidth)
        return Hardware((device,), (own, *self.tiers), tuple(links), self.source)


def of_machine(hardware: Hardware) -> Cluster:
    """One machine, or several of a kind, as a probe or a file has it."""
    device = hardware.devices[0]
    levels = [_inside(hardware)]
    if hardware.machines > 1:
        outer = max(
            (link for link in hardware.links if link.between == "nodes"), key=lambda x: x.joins
        )
        far = tuple(entry for entry in hardware.talked if entry.inside < entry.workers)
        found = outer.latency or latency(FAR)
        levels.append(Level(outer.name, outer.joins, outer.bandwidth, found, talked=far))
    tiers = tuple(tier for tier in hardware.tiers if tier.name != "device")
    group = Group(replace(device, count=1), tuple(levels))
    made = Cluster((group,), tiers, source=hardware.source, slowed=hardware.slowed)
    return rated(made, hardware.rates)


def _inside(hardware: Hardware) -> Level:
    """What joins the devices of a machine."""
    device = hardware.devices[0]
    inner = [link for link in hardware.links if link.between == "devices"]
    fastest = max(inner, key=lambda link: link.bandwidth.value, default=None)
    if fastest is None:  # workers that share one memory: a copy in and a copy out
        said = f"{device.bandwidth.source}; a quarter of the memory's"
        shared = Rate(device.bandwidth.value / 4, "B/s", said, device.bandwidth.date)
        return Level("memory", device.count, shared, latency(NEAR))
    near = tuple(entry for entry in hardware.talked if entry.inside == entry.workers)
    found = fastest.latency or latency(NEAR)
    return Level(fastest.name, device.count, fastest.bandwidth, found, talked=near)


def rated(cluster: Cluster, rates: Sequence[Sequence[float]]) -> Cluster:
    """With what was measured between its machines, or between as many workers of one, who are nodes
    of their own then; as it is where that was measured of others."""
    if cluster.nodes == 1 and len(rates) >= cluster.count > 1:
        (group,) = cluster.groups
        (inner,) = group.levels
        network = Level(inner.name, inner.size, inner.bandwidth, inner.latency)
        alone = replace(inner, size=1, shape="switched", dims=())
        cluster = replace(cluster, groups=(replace(group, levels=(alone, network)),))
    count = cluster.nodes
    if count < 2 or len(rates) < count:
        return cluster
    return replace(cluster, rates=tuple(tuple(row[:count]) for row in rates[:count]))


def latency(seconds: float) -> Rate:
    """A latency of this file's figures."""
    return Rate(seconds, "s", "NCCL 2.19 tuning, Isaev et al., Calculon, 2023", "2026-11-26")


def square(
    rates: Sequence[Sequence[float]], nodes: int, what: str = "rates", unit: str = "B/s"
) -> None:
    """Refuse a matrix of rates, in `unit`, that is none of these nodes'."""
    if not rates:
        return
    for i, row in enumerate(rates):
        if len(row) != len(rates):
            raise OutsizeError(
                f"{what}: row {i} has {len(row)} entries of {len(rates)}; expected a square matrix"
            )
        for j, value in enumerate(row):
            if i != j and not 0 < value < math.inf:
                raise OutsizeError(
                    f"{what}: from {i} to {j} is {value:g} {unit}; expected more than 0"
                )
    if len(rates) != nodes:
        raise OutsizeError(f"{what}: a matrix of {len(rates)} nodes; expected {nodes}")
