"""The tiers of a run: what its keys declare, what they are measured to be, and the stores.

A run without a budget plans with the memory that is free, less what no plan counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from typing import Any

import torch

from outsize.errors import OutsizeError, counted
from outsize.hardware import Hardware, Rate, Tier
from outsize.memory import format_bytes
from outsize.memory.disk import staging_bytes
from outsize.memory.store import Store
from outsize.memory.tiers import (
    TierSpec,
    disk_tier,
    host_tier,
    measured,
    memory_tier,
    open_stores,
    own_rate,
)
from outsize.plan import DEVICE, Plan
from outsize.train.config import RunConfig

FREE = 0.95  # of the memory that is free now may be planned with where no budget is given
RESERVE = 256 << 20  # bytes of it that no plan counts: what kernels, libraries and threads take

ROUNDING = 1 << 17  # bytes a segment: at most four chunks of eight states, a page each


def declared(config: RunConfig, near: int = 1) -> tuple[TierSpec, ...]:
    """The tiers that a run's keys declare for each of its `near` workers on this machine, the
    quickest first. OutsizeError as of outsize/memory/tiers.py."""
    return specs_of(config.host_memory, config.disk, config.tiers, near)


def specs_of(
    host_memory: str | int | None, disk: str | None, tiers: tuple[str, ...], near: int = 1
) -> tuple[TierSpec, ...]:
    """The same of the values by themselves."""
    found = [] if host_memory is None else [host_tier(str(host_memory))]
    found += [memory_tier(text) for text in tiers]
    return (*found, *([] if disk is None else [disk_tier(disk, near)]))


def with_tiers(hardware: Hardware, specs: tuple[TierSpec, ...], near: int = 1) -> Hardware:
    """The hardware with these tiers at the rates that are measured now, shared by `near` workers of
    this machine; a host's that is known already, which on a GPU is that of its link, stays."""
    today = date.today().isoformat()
    made = [_rated(hardware, spec, today, near) for spec in specs]
    names = {tier.name for tier in made}
    return replace(hardware, tiers=(*(t for t in hardware.tiers if t.name not in names), *made))


def _rated(hardware: Hardware, spec: TierSpec, today: str, near: int) -> Tier:
    known = next((t for t in hardware.tiers if t.name == spec.name == "host" and t.read), None)
    if known is not None:
        return replace(known, bytes=spec.bytes, own=_shared(known.own, near))
    tier = measured(spec, today)
    apart = spec.medium == "memory" and hardware.devices[0].apart
    own = own_rate(spec, today) if apart else None
    rates = (_shared(rate, near) for rate in (tier.read, tier.write, own))
    return Tier(tier.name, tier.bytes, *rates)


def _shared(rate: Rate | None, near: int) -> Rate | None:
    return None if rate is None else replace(rate, value=rate.value / near)


def missing_tiers(plan: Plan, specs: Sequence[TierSpec]) -> frozenset[str]:
    """The tiers on which a plan's states rest and that nobody has declared."""
    return named(plan) - {spec.name for spec in specs}


def named(plan: Plan) -> frozenset[str]:
    """The tiers below the device on which a plan's states rest."""
    found = {tier for stage in plan.stages for tier in vars(stage.rest).values()}
    return frozenset(found - {DEVICE})


def check_tiers(plan: Plan, specs: Sequence[TierSpec], remedy: str) -> None:
    """Refuse a plan that has states on a tier that nobody has declared."""
    if missing := missing_tiers(plan, specs):
        raise OutsizeError(
            f"the plan has states on {', '.join(sorted(missing))}; expected where that is: {remedy}"
        )


def reserve(specs: tuple[TierSpec, ...]) -> int:
    """Bytes of memory that a run holds beside what its plan counts."""
    return RESERVE + sum(staging_bytes(len(s.paths)) for s in specs if s.medium == "disk")


def plannable(hardware: Hardware, specs: tuple[TierSpec, ...]) -> int:
    """Bytes that a plan may hold on the device where nobody says how many."""
    free = int(FREE * hardware.tier("device").bytes)
    if not hardware.devices[0].apart:
        free -= reserve(specs) + _beside(specs)
    return max(1, free)


def check_memory(hardware: Hardware, budget: int | None, specs: tuple[TierSpec, ...]) -> None:
    """Refuse a budget that, with the tier beside it, is more than the RAM that there is."""
    beside, free = _beside(specs), hardware.tier("device").bytes
    if budget is None or not beside or hardware.devices[0].apart:
        return
    if budget + beside > free:
        raise OutsizeError(
            f"memory of {format_bytes(budget)} and host memory of {format_bytes(beside)} are one"
            f" RAM here, of which {format_bytes(free)} are free:"
            f" {counted(budget + beside - free, 'byte')}"
            " missing; ask for less of one, or pass --disk DIR"
        )


def _beside(specs: tuple[TierSpec, ...]) -> int:
    """Bytes of RAM that tiers take."""
    return sum(spec.bytes for spec in specs if spec.medium == "memory" and not spec.paths)


@contextmanager
def opened(
    specs: tuple[TierSpec, ...],
    plan: Plan,
    below: Mapping[str, int],
    device: torch.device,
    tell: Callable[[str], Any],
) -> Iterator[dict[str, Store]]:
    """The stores that a plan needs on a device, closed at the end, whatever ends it.

    below: bytes of states that it predicts on each tier. A tier of memory is made no larger than
    that where no activations, whose places come and go, rest on it. tell: is told of pageable
    memory that cannot be page-locked.
    """
    spilled = {stage.rest.activations for stage in plan.stages}
    wanted = [spec for spec in specs if spec.name in named(plan)]
    cut = [_cut(s, plan, below.get(s.name, 0), s.name in spilled) for s in wanted]
    with open_stores(cut, device, tell) as stores:
        yield stores


def _cut(spec: TierSpec, plan: Plan, below: int, spilled: bool) -> TierSpec:
    if spilled or spec.medium == "disk":
        return spec
    rounding = plan.segments * ROUNDING  # states begin at pages
    return replace(spec, bytes=min(spec.bytes, below + rounding))
