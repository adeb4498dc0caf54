"""Forecast: what a plan will hold and take on a machine, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outsize.hardware import Device, Hardware
from outsize.memory import KINDS, Ledger
from outsize.plan import DEVICE, Plan
from outsize.runtime import Job
from outsize.runtime.placement import GRADIENTS, Placement
from outsize.schedule import Action, Kind, Lane, Schedule, State, validate
from outsize.schedule.action import WHOLE
from outsize.schedule.residency import moved as item_of
from outsize.simulate.counter import Work
from outsize.simulate.rehearse import Costs, moved, rehearse
from outsize.simulate.replay import annotate, kinds_at_peak, play
from outsize.trace.trace import Trace

_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as the catalogue has them


@dataclass(frozen=True)
class Forecast:
    """What a plan will hold (bytes) and take (seconds a step).

    static: bytes by kind that are always there. segments: by segment of the model, its static
    bytes, the activations that one microbatch keeps of it, and the workspace of its costliest
    action. peak: highest bytes on the device tier; peak_by_kind: at that moment. flops: operations
    of products and attention in a step, what recompute adds included. below: bytes on each tier
    below the device, those of activations included. parameters: of the model, wherever they are.
    """

    plan: Plan
    schedule: Schedule
    static: Mapping[str, int]
    segments: tuple[tuple[str, Mapping[str, int]], ...]
    peak: int
    peak_by_kind: Mapping[str, int]
    seconds: float
    flops: float
    trace: Trace
    below: Mapping[str, int] = field(default_factory=dict)
    parameters: int = 0


def forecast(
    plan: Plan,
    job_of: Callable[[Plan, Ledger], Job],
    batch_of: Callable[[int], object],
    hardware: Hardware,
) -> Forecast:
    """Foretell a plan by rehearsing one microbatch and replaying the step."""
    costs = rehearse(plan, job_of, batch_of)
    return compose(plan, costs, hardware)


def compose(plan: Plan, costs: Costs, hardware: Hardware) -> Forecast:
    """The forecast of a plan whose actions' costs are known."""
    placement = costs.facts.placement(plan)
    schedule = annotate(placement.schedule, costs)
    held = _held(placement)
    static = {"data": costs.data, "window": placement.pool}
    for kinds in held:
        for kind, count in kinds.items():
            static[kind] = static.get(kind, 0) + count
    static = {kind: count for kind, count in static.items() if count}
    validate(schedule, static=sum(static.values()))
    trace = play(schedule, static, Clock(placement, costs, hardware).seconds)
    flops = sum(
        costs.actions[moved(a)].work.flops()
        for a in schedule.workers[0]
        if moved(a) in costs.actions and a.part <= 0
    )
    return Forecast(
        plan, schedule, static, _segments(plan, costs, held), trace.peak(),
        kinds_at_peak(trace, static), trace.span(), flops, trace,
        _below(placement, _spilled(schedule, costs)), sum(t.numel for t in placement.tables),
    )  # fmt: skip


def _held(placement: Placement) -> list[dict[str, int]]:
    """By segment, bytes by kind of the states that the device holds throughout."""
    made: list[dict[str, int]] = [{} for _ in placement.uses]
    for index, table in enumerate(placement.tables):
        for what, dtype in placement.held(index):
            if placement.tier(index, what) == DEVICE:
                kind = what if what in KINDS else "optimizer"
                mine = made[table.segment]
                mine[kind] = mine.get(kind, 0) + table.numel * dtype.itemsize
    return made


def _spilled(schedule: Schedule, costs: Costs) -> dict[int, int]:
    """By stage, the most bytes of its activations that are on their tier at once."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in schedule.workers[0]:
        if action.state is not State.ACTIVATIONS or moved(action) not in costs.actions:
            continue
        size, stage = costs.actions[moved(action)].moves, action.stage
        now[stage] = now.get(stage, 0) + (size if action.kind is Kind.EVICT else -size)
        most[stage] = max(most.get(stage, 0), now[stage])
    return most


def _below(placement: Placement, spilled: Mapping[int, int]) -> dict[str, int]:
    """By tier below the device, bytes of the states and activations that rest there."""
    found: dict[str, int] = {}
    for stage, size in spilled.items():
        tier = placement.plan.stages[stage].rest.activations
        found[tier] = found.get(tier, 0) + size
    for index, table in enumerate(placement.tables):
        for what, dtype in placement.held(index):
            tier = placement.tier(index, what)
            if tier != DEVICE and (what != GRADIENTS or placement.leaves(table.segment)):
                found[tier] = found.get(tier, 0) + table.numel * dtype.itemsize
    return found


@dataclass(frozen=True)
class Clock:
    """How long actions take on a machine."""

    placement: Placement
    costs: Costs
    hardware: Hardware

    def seconds(self, action: Action) -> float:
        """Of one action alone on its lane."""
        if action.kind in (Kind.FETCH, Kind.EVICT):
            return self._moving(action)
        cost = self.costs.actions.get(moved(action))
        if cost is None:
            return 0.0
        whole = duration(cost.work, self.hardware.devices[0])
        whole *= host_share(self.hardware) if action.lane is Lane.HOST else 1.0
        return whole if action.part == WHOLE else whole * self._share(action)

    def _share(self, action: Action) -> float:
        """The part of its stage that an update of a part is."""
        pieces = self.placement.pieces[action.stage]
        here = pieces[action.part]
        return (here.last - here.first) / sum(piece.last - piece.first for piece in pieces)

    def _moving(self, action: Action) -> float:
        fetch = action.kind is Kind.FETCH
        if action.state is State.ACTIVATIONS:
            cost = self.costs.actions.get(moved(action))
            size = 0 if cost is None else cost.moves
            tier = self.placement.plan.stages[action.stage].rest.activations
            return size / rate(self.hardware, tier, fetch)
        total = 0.0
        for span in self.placement.spans[item_of(action)]:
            if span.load if fetch else span.store:
                tier = self.placement.tier(span.chunk, span.what)
                total += span.bytes / rate(self.hardware, tier, fetch)
        return total


def rate(hardware: Hardware, tier: str, fetch: bool) -> float:
    """Bytes a second between a tier and the device; where it was not measured, those of a copy."""
    known = hardware.tier(tier)
    found = known.read if fetch else known.write
    return hardware.devices[0].bandwidth.value / 2 if found is None else found.value


def host_share(hardware: Hardware) -> float:
    """How many times longer an update takes on the host than on the device: both move bytes and
    little else. Where the device is the host's own processor, as long."""
    device = hardware.devices[0]
    if device.kind == "cpu":
        return 1.0
    return max(1.0, device.bandwidth.value / rate(hardware, "host", True))


def duration(work: Work, device: Device) -> float:
    """Seconds of an action's work at a device's measured rates.

    Products at the measured rate of their shape, attention at its own, everything else at the
    bandwidth of memory, and the fixed cost of every operator call.
    """
    measured = device.measured
    total = work.moved / device.bandwidth.value
    for (m, k, n, dtype), calls in work.products.items():
        total += 2.0 * m * k * n * calls / _product_rate(device, m, k, n, dtype)
    for (direction, dtype), operations in work.attention.items():
        total += operations / _attention_rate(device, direction, dtype)
    if measured.overhead is not None:
        total += work.calls * measured.overhead.value
    return total


def _product_rate(device: Device, m: int, k: int, n: int, dtype: str) -> float:
    name = _NAMES.get(dtype, dtype)
    if any(entry.dtype == name for entry in device.measured.matmul):
        return device.measured.matmul_rate(m, k, n, name)
    if dtype == "float64":
        return _product_rate(device, m, k, n, "float32") / 2
    return _peak(device, name)


def _attention_rate(device: Device, direction: str, dtype: str) -> float:
    name = _NAMES.get(dtype, dtype)
    for entry in device.measured.attention:
        if entry.dtype == name and entry.direction == direction:
            return entry.rate.value
    if dtype == "float64":
        return _attention_rate(device, direction, "float32") / 2
    return _peak(device, name) / 2


def _peak(device: Device, name: str) -> float:
    """The catalogue's peak; a dtype it does not list at half of the slowest it does."""
    if name in device.peak:
        return device.peak[name].value
    return min(rate.value for rate in device.peak.values()) / 2


def _segments(
    plan: Plan, costs: Costs, held: list[dict[str, int]]
) -> tuple[tuple[str, Mapping[str, int]], ...]:
    made = [dict(kinds) for kinds in held]
    for (kind, _, stage), cost in costs.actions.items():
        here = made[plan.stages[stage].first]
        if kind is Kind.FORWARD:
            kept = cost.allocates.get("activations", 0)
            here["activations"] = here.get("activations", 0) + kept
        here["workspace"] = max(here.get("workspace", 0), cost.workspace)
    return tuple(zip(costs.segments, made, strict=True))
