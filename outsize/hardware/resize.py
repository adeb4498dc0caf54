"""The same hardware with more devices or fewer: whole machines, or a part of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from outsize.errors import OutsizeError
from outsize.hardware.cluster import FAR, Cluster, Group, Level, latency
from outsize.hardware.devices import ROWS
from outsize.hardware.hardware import Rate
from outsize.hardware.named import catalogue


def resized(cluster: Cluster, count: int) -> Cluster:
    """A cluster of like devices with so many of them; measured rates stay where they are of its
    nodes. Raises OutsizeError where devices would be no whole machines."""
    if count == cluster.count:
        return cluster
    group = Group(cluster.groups[0].device, _levels(joined(cluster), count))
    nodes = group.count // group.node
    kept = nodes <= len(cluster.rates)
    rates = tuple(row[:nodes] for row in cluster.rates[:nodes]) if kept else ()
    return replace(cluster, groups=(group,), rates=rates)


def joined(cluster: Cluster) -> Group:
    """Groups of like devices as one."""
    first, *others = cluster.groups
    if not others:
        return first
    inner = first.levels[:-1]
    slowest = min((group.levels[-1] for group in cluster.groups), key=lambda x: x.bandwidth.value)
    nodes = sum(group.levels[-1].size for group in cluster.groups)
    return Group(first.device, (*inner, replace(slowest, size=nodes)))


def fewer(cluster: Cluster) -> Iterator[int]:
    """Numbers of devices that are whole parts of a cluster, from one on."""
    node, nodes = cluster.groups[0].node, cluster.nodes
    yield from (n for n in range(1, node) if node % n == 0)
    yield from (node * n for n in range(1, nodes + 1) if nodes % n == 0)


def more(cluster: Cluster, most: int = 1 << 16) -> Iterator[int]:
    """Numbers of devices beyond those of a cluster, as machines come."""
    group = joined(cluster)
    node = domain(group)
    count = group.count
    while count < node:
        count = min(node, count * 2)
        yield count
    step = node
    while count + step <= most:
        count += step
        yield count
        if count >= 64 * step:
            step *= 2


def domain(group: Group) -> int:
    """Devices of a machine, or of a domain, as it is sold."""
    row = ROWS.get(group.device.name)
    whole = group.count == group.node and row is not None and not row.torus
    return max(group.node, row.domain) if whole and row is not None else group.node


def _levels(group: Group, count: int) -> tuple[Level, ...]:
    inner, *outer = group.levels
    if inner.shape == "torus" and count <= inner.size:
        return (_smaller(inner, count),)
    if count <= domain(group) and not outer:
        return (replace(inner, size=count),)
    if count <= inner.size:
        return (replace(inner, size=count),)
    node = domain(group)
    if count % node:
        raise OutsizeError(f"{count} devices are no whole machines of {node}")
    whole = inner if inner.size == node else replace(inner, size=node)
    if outer:
        return (whole, *outer[:-1], replace(outer[-1], size=count // node))
    return (whole, Level("network", count // node, _network(group), latency(FAR)))


def _network(group: Group) -> Rate:
    """What the catalogue has of this device."""
    if group.device.name not in ROWS:
        raise OutsizeError(f"{group.device.name}: nothing is known of links between machines")
    return catalogue(group.device.name).links[1].bandwidth


def _smaller(level: Level, count: int) -> Level:
    """A part of a torus: its longest sides are cut; a side of one has no links."""
    dims, ratio = list(level.dims), level.size // count
    if count * ratio != level.size:
        raise OutsizeError(f"{count} chips are no part of a torus of {level.size}")
    while ratio > 1:
        at = max((i for i, d in enumerate(dims) if math.gcd(d, ratio) > 1), key=lambda i: dims[i])
        factor = next(n for n in range(2, ratio + 1) if ratio % n == 0 and dims[at] % n == 0)
        dims[at] //= factor
        ratio //= factor
    used, before = (sum(d > 1 for d in sides) or 1 for sides in (dims, level.dims))
    rate = replace(level.bandwidth, value=level.bandwidth.value * used / before)
    return replace(level, size=count, dims=tuple(dims), bandwidth=rate)
