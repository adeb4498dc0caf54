"""Forecast: what a plan will hold and take on a machine, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outsize.hardware import Device, Hardware
from outsize.memory import Ledger
from outsize.plan import Plan
from outsize.runtime import Job
from outsize.schedule import Action, Kind, Schedule, compile_plan, validate
from outsize.simulate.counter import Work
from outsize.simulate.rehearse import Costs, rehearse
from outsize.simulate.replay import annotate, kinds_at_peak, play
from outsize.trace.trace import Trace

_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as the catalogue has them


@dataclass(frozen=True)
class Forecast:
    """What a plan will hold (bytes) and take (seconds a step).

    static: bytes by kind that are always there. segments: by segment of the model, its static
    bytes, the activations that one microbatch keeps of it, and the workspace of its costliest
    action. peak: highest bytes on the device tier; peak_by_kind: at that moment. flops: operations
    of products and attention in a step, what recompute adds included.
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
    first = min(stage for kind, stage in costs.actions if kind is Kind.UPDATE)
    schedule = annotate(compile_plan(plan, first), costs)
    validate(schedule, static=sum(costs.static.values()))
    device = hardware.devices[0]
    times = {key: duration(cost.work, device) for key, cost in costs.actions.items()}

    def seconds(action: Action) -> float:
        return times.get((action.kind, action.stage), 0.0)

    trace = play(schedule, costs.static, seconds)
    flops = sum(
        costs.actions[a.kind, a.stage].work.flops()
        for a in schedule.workers[0]
        if (a.kind, a.stage) in costs.actions
    )
    return Forecast(
        plan, schedule, costs.static, _segments(plan, costs), trace.peak(),
        kinds_at_peak(trace, costs.static), trace.span(), flops, trace,
    )  # fmt: skip


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


def _segments(plan: Plan, costs: Costs) -> tuple[tuple[str, Mapping[str, int]], ...]:
    made = [dict(kinds) for _, kinds in costs.segments]
    for (kind, stage), cost in costs.actions.items():
        here = made[plan.stages[stage].first]
        if kind is Kind.FORWARD:
            kept = cost.allocates.get("activations", 0)
            here["activations"] = here.get("activations", 0) + kept
        here["workspace"] = max(here.get("workspace", 0), cost.workspace)
    return tuple((name, kinds) for (name, _), kinds in zip(costs.segments, made, strict=True))
