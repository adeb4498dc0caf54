"""A plan of any mesh checked on one machine: every distinct worker's list of a step is made, all
are proved together, and each is played on fake tensors under the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outsize.hardware import Hardware
from outsize.hardware.probe import probe
from outsize.hardware.shared import shared
from outsize.memory.tiers import TierSpec
from outsize.plan import DEVICE, DISK, Plan
from outsize.search import played
from outsize.simulate import Forecast
from outsize.train.planned import KEY, with_plan
from outsize.train.resolve import as_sets, resolve
from outsize.train.setup import near, request_of, set_up
from outsize.train.workers import over_workers

TURNS = 2  # microbatches that are played for each stage of a pipeline; more repeat what these do


@dataclass(frozen=True)
class Worker:
    """One place of the pipeline axis; along the others lists are alike. foretold, played: bytes at
    the peak, as composed from one microbatch, and as the ledger has seen them of the whole list."""

    actions: int
    parameters: int
    foretold: int
    played: int
    by_kind: Mapping[str, int]


@dataclass(frozen=True)
class Rehearsed:
    """microbatches: that were played, of those of the plan."""

    plan: Plan
    workers: tuple[Worker, ...]
    seconds: float
    microbatches: int


def rehearsed(path: Path, model: str | None, hardware: Hardware | None) -> Rehearsed:
    """Of a plan file. model: where it is not the file's own; hardware: of one worker, this machine
    where none is given. Raises OutsizeError for a plan that cannot run exactly, and for that of
    another model."""
    said = as_sets({KEY: str(path), "model.name": model, "model.weights": "random"})
    resolved = over_workers(with_plan(resolve(None, said)))
    machine = shared(probe(), near(resolved.config)) if hardware is None else hardware
    setup = set_up(resolved, fit=False, hardware=machine, tiers=_below(machine))
    device = setup.hardware.devices[0]
    request = replace(
        request_of(setup.resolved, setup.tiers), apart=device.apart, grain=device.grain
    )
    few = _fewer(setup.plan)
    whole = played.predict(
        setup.subject.config, replace(request, rows=few.rows), few, setup.hardware
    )
    pairs = zip(_ranks(setup.forecast), _ranks(whole), strict=True)
    workers = tuple(Worker(one[0], one[1], one[2], other[2], other[3]) for one, other in pairs)
    return Rehearsed(setup.plan, workers, setup.forecast.seconds, few.microbatches)


def _below(hardware: Hardware) -> tuple[TierSpec, ...]:
    """The tiers that a machine has, as a run declares them; nothing is opened."""
    return tuple(
        TierSpec(tier.name, "disk", (Path("."),), tier.bytes)
        if tier.name == DISK
        else TierSpec(tier.name, "memory", (), tier.bytes)
        for tier in hardware.tiers
        if tier.name != DEVICE and tier.bytes
    )


def _fewer(plan: Plan) -> Plan:
    """With as many microbatches as fill its pipeline, and empty it."""
    count = min(plan.microbatches, TURNS * plan.mesh.pipeline)
    return replace(plan, rows=count * plan.microbatch_rows * plan.mesh.rows, row_shares=())


def _ranks(made: Forecast) -> list[tuple[int, int, int, Mapping[str, int]]]:
    """Actions, parameters, peak and what it is of, by place of the pipeline axis."""
    every = made.ranks or (made,)
    return [
        (len(one.schedule.workers[0]), one.parameters, one.peak, one.peak_by_kind) for one in every
    ]
