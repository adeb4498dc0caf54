"""A plan on hardware that is described: the layout that is asked for, or the best that fits.

Every cell (outsize/foresight/planning/layouts.py) has a lower bound of its seconds: its layout with
nothing sharded, recomputed or summed and the most chunks, by the same forecast. Cells are opened
from the least bound on; those whose bound lies above the plans that are kept are left shut, since
every lane of a variant takes at least as long as the bound has it. Where rates between machines
were measured, all of this takes every link to be as fast as the best one, and what that leaves is
put on the machines in the order of its seconds (outsize/foresight/planning/placement.py). Seconds
of searching are of this thread's processor time, so that a busy machine chooses the same plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from outsize.errors import OutsizeError
from outsize.foresight.constants import Array, Batch, Model, batch_of, tags
from outsize.foresight.conventions import COUNTS
from outsize.foresight.fitted import fitted
from outsize.foresight.layout import Layout
from outsize.foresight.memory import Memory, reserves
from outsize.foresight.network import Network
from outsize.foresight.planning.asked import Asked, Objective
from outsize.foresight.planning.filled import filled
from outsize.foresight.planning.known import Known
from outsize.foresight.planning.layouts import CHUNKS, Cell, cells, norms
from outsize.foresight.planning.placement import Order, best_order
from outsize.foresight.score import published
from outsize.foresight.shape import Shape
from outsize.foresight.sources import Roofline
from outsize.foresight.step import Terms, terms
from outsize.hardware.cluster import Cluster
from outsize.hardware.resize import resized


@dataclass(frozen=True)
class Planned:
    """A layout with its forecast. lanes: seconds of a step by lane; low, high: of the step.
    machines: in the order of the ranks on them, where rates between them were measured; given:
    seconds of the same layout on the machines as they are numbered."""

    layout: Layout
    seconds: float
    low: float
    high: float
    lanes: dict[str, float]
    memory: Memory
    room: int
    operations: float  # of a step, as mfu counts them
    peak: float  # FLOP/s of all devices
    machines: Order = ()
    given: float = 0.0

    @property
    def fits(self) -> bool:
        return self.memory.process <= self.room

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.layout.batch * self.layout.sequence

    @property
    def mfu(self) -> float:
        return self.operations / (self.seconds * self.peak)

    @property
    def binds(self) -> str:
        """The lane that takes longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    def rank(self, objective: str) -> tuple[float, float]:
        return rank(objective, self.seconds, self.layout, self.memory)


@dataclass(frozen=True)
class Choice:
    """Plans from the best on: none where nothing fits, then `nearest` lacks the fewest bytes.

    counted: layouts whose bytes were counted, fitting: those of them that fit; shut: cells that
    a bound left out; finished: whether seconds were enough for all others."""

    plans: Sequence[Planned]
    nearest: Planned | None
    counted: int
    fitting: int
    shut: int = 0
    finished: bool = True


@dataclass
class _Search:
    """What has been found so far."""

    shape: Shape
    asked: Asked
    top: int
    known: Known
    measured: Cluster | None = None  # whose links differ
    best: list[Planned] = field(default_factory=list)
    least: tuple[float, Layout, Cell] | None = None
    counted: int = 0
    fitting: int = 0
    orders: dict[tuple[int, ...], Order] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """What a further plan must stay below."""
        full = len(self.best) >= self.top
        return self.best[-1].rank(self.asked.objective)[0] if full else math.inf

    def open(self, cell: Cell) -> None:
        """Take up what fits of a cell."""
        room = room_of(self.asked, cell.cluster)
        made, held = [], []
        for layout, each in filled(self.known, self.asked, cell, room):
            self.counted += 1
            if self.least is None or each.process < self.least[0]:
                self.least = each.process, layout, cell
            if each.process <= room:
                made.append(layout)
                held.append(each)
        if not made:
            return
        self.fitting += len(made)
        if self.asked.objective == "memory":  # bytes are known: what has more need not be timed
            bound = min(self.worst, sorted(each.process for each in held)[: self.top][-1])
            kept = [i for i, each in enumerate(held) if each.process <= bound]
            made, held = [made[i] for i in kept], [held[i] for i in kept]
        if not made:
            return
        goal, most = self.asked.objective, len(made) if self.measured else self.top
        found = forecast(self.shape, made, cell.cluster, held, room, goal, most, self.known)
        if self.measured is None:
            self._keep(found)
            return
        part = resized(self.measured, cell.base.devices)
        for plan in found:
            if plan.rank(goal)[0] > self.worst:
                break
            self._keep([self._placed(plan, part)])

    def _keep(self, plans: Sequence[Planned]) -> None:
        every = sorted((*self.best, *plans), key=lambda plan: plan.rank(self.asked.objective))
        self.best = every[: self.top]

    def _placed(self, plan: Planned, cluster: Cluster) -> Planned:
        """A plan on machines whose links differ: with the order that is best for its groups, which
        other layouts of the same groups share."""
        lay = plan.layout
        if cluster.nodes < 2:
            return plan
        key = lay.devices, lay.tensor, lay.pipeline, lay.context, lay.expert, lay.shards, lay.states
        if key not in self.orders:
            self.orders[key] = order_of(self.shape, lay, cluster)
        order = self.orders[key]
        given, placed = (
            forecast(self.shape, [lay], cluster.placed(each), [plan.memory], plan.room)[0]
            for each in (range(cluster.nodes), order)
        )
        if placed.seconds > given.seconds:
            placed, order = given, tuple(range(cluster.nodes))
        return replace(placed, machines=order, given=given.seconds)


def choose(
    shape: Shape, asked: Asked, cluster: Cluster, top: int = 5, known: Known | None = None
) -> Choice:
    """The best layouts that fit, by what is asked to be least. known: what searches for the same
    model on the same cluster have evaluated.

    Raises OutsizeError for unlike devices, and where no layout has what is asked."""
    if not cluster.alike:
        names = ", ".join(group.device.name for group in cluster.groups)
        raise OutsizeError(f"hardware of unlike devices ({names}); plans are of one kind yet")
    until = time.thread_time() + asked.seconds
    measured = cluster if cluster.rates and cluster.nodes > 1 else None
    every = list(cells(shape, asked, at_best(cluster) if measured else cluster))
    if not every:
        raise OutsizeError(_none_divides(asked, cluster))
    known = known or Known(shape, reserves(cluster.groups[0].device))
    bounds = _bounds(known, asked, every)
    search, shut, finished = _Search(shape, asked, top, known, measured), 0, True
    if shape.module is not None:  # whose rehearsals are no searching
        until = time.thread_time() + asked.seconds
    order = np.argsort(bounds, kind="stable")
    for at, i in enumerate(order):
        if asked.objective != "memory" and bounds[i] > search.worst:
            shut = len(order) - at
            break
        search.open(every[i])
        if time.thread_time() > until and at + 1 < len(order):
            finished = False
            break
    if not search.counted:
        raise OutsizeError(_none_divides(asked, cluster))
    nearest = None if search.best else _nearest(search)
    return Choice(search.best, nearest, search.counted, search.fitting, shut, finished)


def _nearest(search: _Search) -> Planned | None:
    if search.least is None:
        return None
    _, layout, cell = search.least
    room = room_of(search.asked, cell.cluster)
    held = search.known.memory(layout)
    return forecast(search.shape, [layout], cell.cluster, [held], room)[0]


def _none_divides(asked: Asked, cluster: Cluster) -> str:
    least = f"--max-devices {asked.devices}" if asked.devices else ""
    said = " and ".join(part for part in (asked.conditions.said(), least) if part)
    return (
        f"no layout of {cluster.count} devices has {said or 'what is asked'};"
        f" expected axes that divide them, heads and layers, and rows that divide {asked.batch}"
    )


def room_of(asked: Asked, cluster: Cluster) -> int:
    """Bytes of a device that a process may take, reserves included. Where they are not said, what
    bytes may be foretold too low by is left."""
    device = cluster.groups[0].device
    has = device.memory_bytes
    if asked.memory is not None:
        return min(asked.memory, has)
    return int(has * (1 - reserves(device).doubt))


def _bounds(known: Known, asked: Asked, every: Sequence[Cell]) -> Array:
    """Of each cell what is to be least, from below."""
    made, mine = [], []
    for i, cell in enumerate(every):
        for norm in norms(asked, cell) or (False,):
            made.append(replace(cell.base, sequence_parallel=norm))
            mine.append(i)
    counted = []
    for i, layout in zip(mine, made, strict=True):
        each = known.terms(layout, every[i].cluster)
        middle, last = ({**stage, "adding": 0.0} for stage in (each.middle, each.last))
        most = max((int(v) for v in asked.conditions.among("chunks", CHUNKS)), default=1)
        counted.append(replace(each, middle=middle, last=last, end={}, chunks=float(most)))
    found = np.full(len(every), np.inf)
    device = every[0].cluster.groups[0].device.name
    total = Priced.of(known.shape, made, device, counted).seconds
    for i, layout, value in zip(mine, made, total, strict=True):
        scale = layout.devices if asked.objective in ("cost", "energy") else 1
        found[i] = min(found[i], float(value) * scale)
    return found


@dataclass(frozen=True)
class Priced:
    """Terms of layouts on one kind of device, with the constants that ship."""

    batch: Batch
    model: Model
    values: Array

    @staticmethod
    def of(shape: Shape, made: Sequence[Layout], device: str, counted: Sequence[Terms]) -> Priced:
        batch = batch_of(counted, [tags(shape, layout, device) for layout in made])
        model = Model.of(batch)
        return Priced(batch, model, model.read(fitted().values))

    @cached_property
    def seconds(self) -> Array:
        """Of a step of each."""
        found: Array = self.model.seconds(self.batch, self.values).total
        return found

    def lanes(self, index: int) -> dict[str, float]:
        return self.model.lanes_of(self.batch, self.values, index)


def forecast(
    shape: Shape, made: Sequence[Layout], cluster: Cluster, held: Sequence[Memory], room: int,
    objective: Objective = "time", top: int = 1 << 30, known: Known | None = None,
) -> list[Planned]:  # fmt: skip
    """Layouts with their seconds, the best first, no more than `top` of them."""
    device, known = cluster.groups[0].device, known or Known(shape)
    priced = Priced.of(shape, made, device.name, [known.terms(lay, cluster) for lay in made])
    off = reach(device.name, made[0].precision)
    ranks = [
        rank(objective, float(value), lay, each)
        for value, lay, each in zip(priced.seconds, made, held, strict=True)
    ]
    peak = Roofline(device).peak(made[0].precision)
    found = []
    for i in sorted(range(len(made)), key=ranks.__getitem__)[:top]:
        layout, value = made[i], float(priced.seconds[i])
        tokens = float(layout.batch * layout.sequence)
        found.append(
            Planned(
                layout,
                value,
                value / off,
                value * off,
                priced.lanes(i),
                held[i],
                room,
                COUNTS["causal"](shape, tokens, layout.attended, False)
                if shape.module is None
                else shape.module.flops(layout),
                peak * layout.devices,
            )
        )
    return found


def order_of(shape: Shape, layout: Layout, cluster: Cluster) -> Order:
    """The machines of a cluster in the best order for a layout that is found."""
    device = cluster.groups[0].device.name

    def price(network: Network) -> float:
        counted = terms(shape, layout, cluster, network=network)
        return float(Priced.of(shape, [layout], device, [counted]).seconds[0])

    stages = layout.pipeline, layout.devices // layout.pipeline
    return best_order(cluster, stages, price)


def placed(cluster: Cluster, plan: Planned) -> Cluster:
    """The part of a cluster that a plan takes, its machines in the plan's order."""
    part = resized(cluster, plan.layout.devices)
    return part.placed(plan.machines) if plan.machines else part


def at_best(cluster: Cluster) -> Cluster:
    """A cluster all of whose links are as fast as the best that was measured."""
    best = max(rate for i, row in enumerate(cluster.rates) for j, rate in enumerate(row) if i != j)
    groups = []
    for group in cluster.groups:
        *inner, last = group.levels
        wide = replace(last, bandwidth=replace(last.bandwidth, value=best, upto=None))
        groups.append(replace(group, levels=(*inner, wide)))
    return replace(cluster, groups=tuple(groups), rates=())


def rank(objective: str, seconds: float, layout: Layout, held: Memory) -> tuple[float, float]:
    """What is to be least, and what decides between equal ones."""
    if objective == "memory":
        return held.process, seconds
    if objective == "time":
        return seconds, held.process
    return seconds * layout.devices, seconds


def reach(device: str, precision: str) -> float:
    """The factor that seconds may be off, either way: of nine tenths of the forecasts."""
    constants = fitted()
    return math.exp(constants.reach if published(device, precision) else constants.far)
