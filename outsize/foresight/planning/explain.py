"""Why a plan is the one: what others lose by, why families of layouts were rejected, what other
hardware would change, and where every figure comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from outsize.errors import OutsizeError
from outsize.foresight.constants import PRIORS
from outsize.foresight.fitted import fitted
from outsize.foresight.memory import memory, reserves
from outsize.foresight.planning.asked import EXPERTS, Asked, Condition, conditions, value_of
from outsize.foresight.planning.choose import Planned, Priced, choose, placed, room_of
from outsize.foresight.planning.known import Known
from outsize.foresight.planning.layouts import cells, variants
from outsize.foresight.resting import LINK, usable
from outsize.foresight.shape import Shape
from outsize.foresight.sources import LIKE
from outsize.foresight.step import COMPUTING, terms
from outsize.hardware.cluster import Cluster
from outsize.hardware.hardware import Rate
from outsize.hardware.resize import more, resized

GIB = 1 << 30
# What a lane waits for.
RESOURCES: Mapping[str, tuple[str, ...]] = {
    "products": ("matmul", "narrow", "attention"),
    "memory of the device": ("traffic", "scores", "scan", "cast", "adding", "update"),
    "processor that launches": ("launch", "called"),
    "link to host memory and disk": ("moved",),
    "links": ("tensor", "exchange", "ring", "stages", "gathers", "sums"),
    "idle in the pipeline": ("fill",),
}
FAMILIES = (
    "tensor=1", "tensor>1", "pipeline=1", "pipeline>1", "context>1", "expert>1", "zero=0", "zero=1",
    "zero=3", "recompute=none", "recompute=part", "recompute=full", "rows=1", "rows>1", "chunks>1",
    "sequence-parallel=0",
)  # fmt: skip


def by_resource(lanes: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step that each resource is asked for; they lie beside each other in part."""
    found = {name: sum(lanes.get(lane, 0.0) for lane in of) for name, of in RESOURCES.items()}
    return {name: value for name, value in found.items() if value}


def loss(plan: Planned, best: Planned) -> str:
    """By what a plan is behind the chosen one: of its lanes that which grew the most."""
    count, fewer = plan.layout.devices, best.layout.devices
    if count != fewer:
        time = plan.seconds / best.seconds
        spent = f"{time - 1:+.1%} seconds, {time * count / fewer - 1:+.1%} device-hours"
        return f"{spent} on {count} devices instead of {fewer}"
    grown = {k: v - best.lanes.get(k, 0.0) for k, v in plan.lanes.items()}
    lane = max(grown, key=lambda name: grown[name])
    slower = plan.seconds / best.seconds - 1
    if grown[lane] <= 0 or slower <= 0:
        return f"{plan.memory.process / GIB:.1f} GiB instead of {best.memory.process / GIB:.1f}"
    return f"{slower:.1%} slower: {lane} {grown[lane]:.3g} s more"


@dataclass(frozen=True)
class Family:
    """Layouts with one thing in common, none of which was chosen, and why; chosen: one was."""

    name: str
    reason: str
    chosen: bool = False


def families(shape: Shape, asked: Asked, cluster: Cluster, best: Planned) -> Iterator[Family]:
    """Of each a reason with a number."""
    known = Known(shape, reserves(cluster.groups[0].device))
    for name in FAMILIES:
        (one,) = conditions((name,), "family")
        if one.name == EXPERTS and not shape.experts:
            continue
        why = None if shape.module is None else shape.module.left.get(one.name)
        if why and not one.holds(value_of(best.layout, one.name)):
            yield Family(name, f"0 layouts: {why}")
            continue
        if one.holds(value_of(best.layout, one.name)):
            yield Family(name, "the plan is one of them", True)
        else:
            yield Family(name, _reason(known, asked, cluster, best, one))


def _reason(known: Known, asked: Asked, cluster: Cluster, best: Planned, one: Condition) -> str:
    try:
        wished = replace(asked, conditions=asked.conditions.with_required(one))
        made = choose(known.shape, wished, cluster, 1, known)
    except OutsizeError:
        return "0 layouts: ruled out by what is asked, or nothing divides"
    if made.plans:
        return loss(made.plans[0], best)
    assert made.nearest is not None
    lacks = (made.nearest.memory.process - made.nearest.room) / GIB
    return f"0 of {made.counted} fit: {lacks:.1f} GiB missing at least"


@dataclass(frozen=True)
class Change:
    """What other hardware or another sequence would make of it. plan: None where there is none, for
    the reason said; gain: of its tokens a second over the chosen plan's."""

    name: str
    plan: Planned | None
    gain: float = 0.0
    reason: str = ""


def changes(shape: Shape, asked: Asked, cluster: Cluster, best: Planned) -> Iterator[Change]:
    """One machine more, 8 GiB more, half the sequence, twice the link."""
    tried: tuple[tuple[str, Callable[[], tuple[Asked, Cluster]]], ...] = (
        ("one machine more", lambda: _larger(asked, cluster)),
        ("8 GiB more", lambda: _roomier(asked, cluster)),
        ("half the sequence", lambda: (_shorter(shape, asked), cluster)),
        ("twice the link", lambda: (asked, _faster(cluster))),
    )
    for name, what in tried:
        try:
            made = choose(shape, *what(), 1)
        except OutsizeError as error:
            yield Change(name, None, reason=str(error))
            continue
        if not made.plans:
            yield Change(name, None, reason="nothing fits")
            continue
        plan = made.plans[0]
        gain = plan.tokens / plan.seconds / (best.tokens / best.seconds) - 1
        yield Change(name, plan, gain)


def _larger(asked: Asked, cluster: Cluster) -> tuple[Asked, Cluster]:
    """All devices of it, and rows that they can share."""
    grown = resized(cluster, next(more(cluster)))
    parts = grown.count if asked.batch >= grown.count else grown.nodes
    batch = max(1, round(asked.batch / parts)) * parts
    return replace(asked, batch=batch, devices=None), grown


def _roomier(asked: Asked, cluster: Cluster) -> tuple[Asked, Cluster]:
    group = cluster.groups[0]
    more_room = Rate(group.device.memory_bytes + 8 * GIB, "B", "asked", "")
    device = replace(group.device, visible=more_room)
    budget = None if asked.memory is None else asked.memory + 8 * GIB
    made = replace(cluster, groups=(replace(group, device=device), *cluster.groups[1:]))
    return replace(asked, memory=budget), made


def _shorter(shape: Shape, asked: Asked) -> Asked:
    if shape.module is not None:
        raise OutsizeError("a module is rehearsed at one length; --set train.sequence says another")
    if asked.lengths.seen:
        raise OutsizeError("documents keep their lengths; --set train.sequence says another row")
    if asked.sequence % 2:
        raise OutsizeError(f"{asked.sequence} tokens have no half")
    return replace(asked, sequence=asked.sequence // 2, batch=asked.batch * 2)


def _faster(cluster: Cluster) -> Cluster:
    """What joins machines, or devices where there is one machine; measured rates likewise."""
    groups = []
    for group in cluster.groups:
        *inner, last = group.levels
        wide = replace(last.bandwidth, value=last.bandwidth.value * 2, upto=None)
        groups.append(replace(group, levels=(*inner, replace(last, bandwidth=wide))))
    rates = tuple(tuple(2 * rate for rate in row) for row in cluster.rates)
    return replace(cluster, groups=tuple(groups), rates=rates)


# -- where figures come from -----------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One constant of a forecast: its value as people read it, and its source."""

    name: str
    value: str
    source: str


def figures(shape: Shape, cluster: Cluster, best: Planned) -> Iterator[Figure]:
    """Every constant that the chosen plan's seconds and bytes hang on."""
    device, dtype = cluster.groups[0].device, best.layout.precision
    dtype = dtype if dtype in device.peak else LIKE.get(dtype, dtype)
    if dtype in device.peak:
        yield _rate(f"peak in {dtype}", device.peak[dtype], 1e12, "TFLOP/s")
    yield _rate("memory's rate", device.bandwidth, 1e9, "GB/s")
    yield _rate("memory that a process sees", device.visible or device.memory, GIB, "GiB")
    for level in cluster.groups[0].levels:
        if level.size > 1:
            yield _rate(f"link {level.name} of {level.size}", level.bandwidth, 1e9, "GB/s")
            yield _rate(f"latency of {level.name}", level.latency, 1e-6, "us")
    for name, tier in usable(cluster).items():
        if name in best.memory.below:
            link = f"{LINK / 1e9:,.4g} GB/s", "PCIe 4.0 x16, where nothing is said"
            read = f"{tier.read.value / 1e9:,.4g} GB/s" if tier.read else link[0]
            yield Figure(f"link to {name}", read, tier.read.source if tier.read else link[1])
    if best.machines:
        apart = [v for i, row in enumerate(cluster.rates) for j, v in enumerate(row) if i != j]
        said = f"{min(apart) / 1e9:,.4g} to {max(apart) / 1e9:,.4g} GB/s"
        yield Figure("rates between machines", said, f"{cluster.source}, measured")
    yield from _factors(shape, cluster, best)
    kept = best.memory.kept
    for name, value in (
        ("reserve: context", f"{kept.libraries / GIB:.2f} GiB"),
        ("reserve: a communicator", f"{kept.communicator / GIB:.2f} GiB"),
        ("reserve: fragmentation", f"{kept.fragments:.1%} of tensors"),
        ("reserve: doubt of bytes", f"{kept.doubt:.1%} of the device, without --memory"),
    ):
        yield Figure(name, value, kept.source)
    off = best.high / best.seconds
    said = "errors of held-out publications, nine tenths of them (docs/accuracy.md)"
    yield Figure("interval of every time", f"x {1 / off:.2f} to {off:.2f}", said)


def _rate(name: str, rate: Rate, unit: float, word: str) -> Figure:
    source = ", ".join(part for part in (rate.source, rate.date, rate.note) if part)
    return Figure(name, f"{rate.value / unit:,.4g} {word}", source)


def _factors(shape: Shape, cluster: Cluster, best: Planned) -> Iterator[Figure]:
    """Of lanes that take a thousandth of the step."""
    device = cluster.groups[0].device.name
    layout = best.layout
    priced = Priced.of(shape, [layout], device, [terms(shape, layout, placed(cluster, best))])
    model, known = priced.model, fitted().values
    taken = {lane for lane, value in best.lanes.items() if value > best.seconds / 1000}
    if taken & set(COMPUTING):
        taken.add("computing")
    if layout.devices > cluster.groups[0].node:
        taken.add("nodes")
    for at, name in enumerate(model.names):
        if model.applies[0][at] and model.lanes[at] in taken:
            prior = PRIORS.get(name, ("", "", 1.0, 0.0))[2]
            fit = "fitted on published runs" if name in known else "not fitted"
            value = f"x {math.exp(priced.values[at]):.3g}"
            yield Figure(f"factor of {model.lanes[at]}: {name}", value, f"{fit}; prior x {prior:g}")


# -- where nothing fits ----------------------------------------------------------------------------


def fewest(shape: Shape, asked: Asked, cluster: Cluster) -> int | None:
    """The fewest devices beyond those of a cluster on which something fits; None: unknown."""
    try:
        for count in more(cluster):
            if asked.batch * asked.sequence < count:
                return None
            if _any(shape, replace(asked, devices=None), resized(cluster, count)):
                return count
    except OutsizeError:  # of hardware of which nothing larger is known
        return None
    return None


def _any(shape: Shape, asked: Asked, cluster: Cluster) -> bool:
    room, kept = room_of(asked, cluster), reserves(cluster.groups[0].device)
    whole = replace(asked, objective="time")
    return any(
        memory(shape, layout, kept).process <= room
        for cell in cells(shape, whole, cluster)
        for layout in variants(shape, whole, cell)
        if asked.conditions.allow("recompute", layout.recompute)
    )
