"""What rests below the device: on host memory or a disk, how much, and the seconds that it moves.

States pass a worker's link stage by stage (Rajbhandari et al., "ZeRO-Infinity", 2021): weights come
for a forward and for a backward pass, gradients go and, from the second microbatch on, come before;
the master copy and the moments come and go once a step. A disk is shared by the devices of a
machine and reads and writes in turn; a link to host memory is a device's own and has both
directions at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from outsize.foresight.layout import Layout, Resting, stored
from outsize.hardware.cluster import Cluster
from outsize.hardware.hardware import Tier
from outsize.plan.interleaved import shared

HOST, DISK = "host", "disk"
LINK = 32e9  # B/s of PCIe 4.0 with 16 lanes, where nothing is said (shared/data/hardware.md)
PART = 1 << 22  # elements of a part of an update (outsize.plan.Stream)
UPDATED = 48.0  # bytes that AdamW on a host reads and writes of an element, as a rehearsal counts
MASTER = 12.0  # bytes of an element's master copy and moments, which come and go
ROOM = 4096  # bytes of which each state in the pool takes whole multiples (memory/arrange.py)
RESIDENT = 2  # stages, and parts of an update, whose states are there at once (outsize.plan.Stream)


def room(nbytes: float) -> int:
    """Bytes that a state takes in the pool."""
    return -(-int(nbytes) // ROOM) * ROOM


def usable(cluster: Cluster) -> dict[str, Tier]:
    """Host memory and disks of a cluster that a device's states may rest on; none where the
    device's memory is the host's."""
    if not cluster.alike or not cluster.groups[0].device.apart:
        return {}
    return {tier.name: tier for tier in cluster.tiers if tier.name in (HOST, DISK)}


def ways(layout: Layout, cluster: Cluster) -> Iterator[Layout]:
    """A layout with its states and activations on the device, and on every tier. Runs that stream
    are planned without a pipeline, and with all states of a worker cut alike; gradients that
    workers sum as wholes stay on the device."""
    yield layout
    names = [name for name in (HOST, DISK) if name in usable(cluster)]
    if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1:
        return
    whole = layout.data == 1 or layout.shards == layout.data
    for kept in ("", *names[:1]):
        for i, below in enumerate(("", *names)):
            higher = names[:i] if whole else ()
            for at in (
                Resting("", below, kept),
                *(Resting(weights, below, kept) for weights in higher),
                *(Resting("", below, kept, gradients) for gradients in higher),
            ):
                if below or kept:
                    host, over = _on_host(layout, at, cluster)
                    yield replace(layout, resting=replace(at, host=host, over=over))


def _on_host(layout: Layout, at: Resting, cluster: Cluster) -> tuple[int, int]:
    """Of how many parts of an update how many go over the device, where states and gradients are on
    a host whose own memory has a known rate."""
    tier = usable(cluster).get(HOST)
    if tier is None or tier.own is None or (at.optimizer, at.summed) != (HOST, HOST):
        return 0, 1
    asked = replace(layout, resting=replace(at, host=0))
    over = seconds(cluster, asked, *of_update(asked, 1.0))
    return shared(over, _at_rest(cluster, asked, 1.0))


def below(states: Mapping[str, float], activations: float, at: Resting, graded: float = 1.0) -> (
    dict[str, float]
):  # fmt: skip
    """Bytes of a worker by tier. graded: how much is there of what rests below in part."""
    found = dict[str, float]()
    weights, gradients, optimizer = at.parts(graded)
    for tier, held in (
        (at.weights, weights * states["weights"]),
        (at.summed, gradients * states["gradients"]),
        (at.optimizer, optimizer * states["optimizer"]),
        (at.activations, activations),
    ):
        if tier:
            found[tier] = found.get(tier, 0.0) + held
    return found


def hold(cluster: Cluster, layout: Layout, bytes_: Mapping[str, float]) -> bool:
    """Whether the tiers of a machine have room for what its workers put there."""
    tiers, near = usable(cluster), min(layout.devices, cluster.groups[0].node)
    return all(held * near <= tiers[name].bytes for name, held in bytes_.items())


def buffers(layout: Layout, largest: float, parameters: float) -> float:
    """Bytes of the device for what comes and goes: two stages in the passes, two parts in an
    update, which share one pool. largest: parameters of a worker's largest stage; parameters: of a
    worker, of which it updates its share."""
    at = layout.resting
    weights = stored(layout) if at.weights else 0.0
    gradients = layout.stack.gradients if at.summed else 0.0
    passes = RESIDENT * largest * (weights + gradients)
    if not at.optimizer:
        return passes
    part = min(RESIDENT * PART, parameters / max(layout.shards, layout.states))
    return max(passes, part * (MASTER + weights + gradients))


def seconds(cluster: Cluster, layout: Layout, comes: Mapping[str, float],
            goes: Mapping[str, float]) -> float:  # fmt: skip
    """Until so many bytes of a worker have come from each tier and gone to it."""
    tiers, total = usable(cluster), 0.0
    near = min(layout.devices, cluster.groups[0].node)
    for name, tier in tiers.items():
        up = comes.get(name, 0.0) / (tier.read.value if tier.read else LINK)
        down = goes.get(name, 0.0) / (tier.write.value if tier.write else LINK)
        total += near * (up + down) if name == DISK else max(up, down)
    return total


def of_pass(
    layout: Layout, parameters: float, activations: float, back: bool, graded: float = 1.0
) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes that come, that go) for a microbatch's forward or backward pass. parameters: of a
    worker, as they rest."""
    at = layout.resting
    comes, goes = dict[str, float](), dict[str, float]()
    weights, gradients, _ = at.parts(graded)
    if at.weights:
        comes[at.weights] = weights * stored(layout) * parameters
    if at.summed:
        gone = gradients * layout.stack.gradients * parameters if back else 0.0
        comes[at.summed] = comes.get(at.summed, 0.0) + (gone if layout.microbatches > 1 else 0.0)
        goes[at.summed] = gone
    if at.activations:
        moved = comes if back else goes
        moved[at.activations] = moved.get(at.activations, 0.0) + activations
    return comes, goes


def of_microbatch(
    layout: Layout, parameters: float, activations: float, graded: float = 1.0
) -> tuple[dict[str, float], dict[str, float]]:
    """The same for both passes."""
    passes = (of_pass(layout, parameters, activations, back, graded) for back in (False, True))
    one, other = passes
    tiers = sorted({name for each in (*one, *other) for name in each})
    comes, goes = (
        {name: first.get(name, 0.0) + second.get(name, 0.0) for name in tiers}
        for first, second in zip(one, other, strict=True)
    )
    return comes, goes


def of_update(
    layout: Layout, parameters: float, graded: float = 1.0
) -> tuple[dict[str, float], dict[str, float]]:
    """The same for what of a step's update the device makes. parameters: of which a worker updates
    the states."""
    at = layout.resting
    weights, gradients, optimizer = at.parts(graded)
    here = optimizer - both(at, graded) * at.apart
    comes, goes = dict[str, float](), dict[str, float]()
    if at.optimizer:
        comes[at.optimizer] = goes[at.optimizer] = MASTER * parameters * here
    if at.summed:
        each = layout.stack.gradients * parameters
        comes[at.summed] = comes.get(at.summed, 0.0) + each * min(gradients, here)
    if at.weights:
        each = stored(layout) * parameters
        goes[at.weights] = goes.get(at.weights, 0.0) + each * min(weights, here)
    return comes, goes


def updating(cluster: Cluster, layout: Layout, parameters: float, graded: float = 1.0) -> float:
    """Seconds of an update's bytes on the way, or of the host for its own parts beside them."""
    over = seconds(cluster, layout, *of_update(layout, parameters, graded))
    return max(over, at_rest(cluster, layout, parameters, graded))


def at_rest(cluster: Cluster, layout: Layout, parameters: float, graded: float = 1.0) -> float:
    """Seconds in which the host updates its parts of an update."""
    at = layout.resting
    if not at.host:
        return 0.0
    return _at_rest(cluster, layout, parameters * both(at, graded) * at.apart)


def both(at: Resting, graded: float) -> float:
    """Of how much of a worker's parameters gradients and optimizer states are below."""
    return min(at.parts(graded)[1:])


def _at_rest(cluster: Cluster, layout: Layout, parameters: float) -> float:
    """Of so many parameters: the memory of a machine is that of all its devices; weights that stay
    on the device come to it after that."""
    host = usable(cluster)[HOST]
    assert host.own is not None
    near = min(layout.devices, cluster.groups[0].node)
    spent = near * UPDATED * parameters / host.own.value
    if layout.resting.weights:
        return spent
    return spent + seconds(cluster, layout, {HOST: stored(layout) * parameters}, {})
