"""A file of hardware, corrected by what a run took: `outsize train --calibrate FILE`.

The run's plan is foretold anew with the file's own rates, and every rate is divided by how many
times longer its lane was than that: products, attention, memory and calls by the computing lane,
tiers by the lanes that read and write them, links by the network's. So the same run again changes
next to nothing, and a file that is right stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.hardware import Hardware, Link, Rate, Tier
from outsize.hardware.cluster import of_machine
from outsize.hardware.form import dumps, read
from outsize.hardware.host import processor
from outsize.hardware.shared import scaled, shared
from outsize.memory.tiers import TierSpec
from outsize.plan import from_yaml
from outsize.schedule import Lane
from outsize.simulate.rescaled import lanes
from outsize.texts import read_text, write_text
from outsize.train import history
from outsize.train.history import Entry
from outsize.train.resolve import recorded_values
from outsize.train.setup import near, set_up
from outsize.train.tiers import declared, named, with_tiers

SAID = ", corrected by "


@dataclass(frozen=True)
class Used:
    """What a run used of a machine: tiers below the device, and workers that share it."""

    tiers: frozenset[str] = frozenset()
    workers: int = 1


def checked(path: Path) -> Hardware:
    """The hardware of a file that a run here can correct. OutsizeError for others."""
    found = read(path)
    (device, *others) = found.devices
    if others or found.machines > 1:
        raise OutsizeError(f"{path} is of several machines or kinds; expected one machine's file")
    if not device.apart and not accelerator.there() and device.name != processor():
        raise OutsizeError(
            f"{path} is of {device.name!r}, and this is {processor()!r}; expected the file that"
            " `outsize probe --out` wrote here"
        )
    return found


def correct(path: Path, output: Path) -> str:
    """Correct the file by the run in `output`; gives what was done. OutsizeError, with the file as
    it was, where the run has made too few steps."""
    found = checked(path)
    entry = _entry(output)
    said = f"{entry.steps} steps of {entry.model}, {entry.date[:10]}"
    before, used = _foretold(found, output)
    factors = {
        lane: after / before[lane]
        for lane, (_, after) in entry.lanes.items()
        if before.get(lane, 0.0) > 0
    }
    write_text(dumps(corrected(found, factors, used, said)), path)
    each = ", ".join(f"{lane} {factor:.2f}" for lane, factor in factors.items())
    return f"{path} is corrected by {said}; times as long as by its rates: {each}"


def corrected(found: Hardware, factors: Mapping[str, float], used: Used, said: str) -> Hardware:
    """The hardware whose lanes take so many times as long."""
    (device,) = found.devices
    computing = factors.get(Lane.COMPUTE.value, 1.0)
    mine = scaled(device, 1 / computing, computing)
    note = _Note(said)
    if computing != 1.0:
        mine = replace(
            mine,
            bandwidth=note(mine.bandwidth),
            peak={dtype: note(rate) for dtype, rate in mine.peak.items()},
        )
    made = replace(found, devices=(mine,))
    ways = {way: 1 / factors.get(lane.value, 1.0) for way, lane in _WAYS.items()}
    moved = tuple(
        _tier(tier, ways, note) if tier.name in used.tiers else tier for tier in found.tiers
    )
    made = replace(made, tiers=moved)
    talking = factors.get(Lane.NETWORK.value)
    return made if talking is None else _talking(made, found, used.workers, talking, note)


_WAYS = {"read": Lane.FETCH, "write": Lane.EVICT}


class _Note:
    """Says on a rate by what it was corrected, once."""

    def __init__(self, said: str) -> None:
        self._said, self._date = said, date.today().isoformat()

    def __call__(self, rate: Rate, factor: float = 1.0) -> Rate:
        source = f"{rate.source.partition(SAID)[0]}{SAID}{self._said}"
        return replace(rate, value=rate.value * factor, source=source, date=self._date, upto=None)


def _tier(tier: Tier, ways: Mapping[str, float], note: _Note) -> Tier:
    rates = {way: getattr(tier, way) for way in ways}
    made: dict[str, Any] = {
        way: note(rate, ways[way])
        for way, rate in rates.items()
        if rate is not None and ways[way] != 1
    }
    return replace(tier, **made)


def _talking(
    made: Hardware, before: Hardware, workers: int, factor: float, note: _Note
) -> Hardware:
    """Links between workers of the machine, and what was measured of them, so much slower; the one
    that their memory is, where the file has none."""
    inner = [link for link in made.links if link.between == "devices"]
    if not inner:
        level = of_machine(shared(before, workers)).groups[0].levels[0]
        inner = [Link(level.name, "devices", level.bandwidth)]
    mine = tuple(
        replace(
            link,
            bandwidth=note(link.bandwidth, 1 / factor),
            latency=None if link.latency is None else note(link.latency, factor),
        )
        for link in inner
    )
    others = tuple(link for link in made.links if link.between != "devices")
    talked = tuple(replace(one, seconds=note(one.seconds, factor)) for one in made.talked)
    rates = tuple(tuple(rate / factor for rate in row) for row in made.rates)
    return replace(made, links=(*others, *mine), talked=talked, rates=rates)


# -- the run ---------------------------------------------------------------------------------------


def _entry(output: Path) -> Entry:
    """What the run in a directory measured last."""
    entries, _ = history.read()
    mine = [one for one in entries if one.output == str(output.resolve())]
    if not mine:
        raise OutsizeError(
            f"the run in {output} measured fewer than {history.LEAST} steps by the clock; go on"
            " with it for ten more steps"
        )
    return mine[-1]


def _foretold(found: Hardware, output: Path) -> tuple[Mapping[str, float], Used]:
    """Seconds of the lanes of a step by a file's rates, and what of it the run used."""
    from outsize.train.run import PLAN

    resolved = recorded_values(output)
    count = near(resolved.config)
    specs = declared(resolved.config, count)
    hardware = shared(_with(found, specs, count), count)
    plan = from_yaml(read_text(output / PLAN))
    setup = set_up(resolved, plan, fit=False, hardware=hardware)
    return lanes(setup.forecast.trace), Used(named(setup.plan), count)


def _with(found: Hardware, specs: tuple[TierSpec, ...], count: int) -> Hardware:
    """The file's hardware with the run's tiers, at its own rates where it has them."""
    known = {tier.name: tier for tier in found.tiers if tier.read is not None}
    here = [spec for spec in specs if spec.name in known]
    made = with_tiers(found, tuple(spec for spec in specs if spec not in here), count)
    mine = {spec.name: _shared(known[spec.name], spec, count) for spec in here}
    return replace(made, tiers=tuple(mine.get(tier.name, tier) for tier in made.tiers))


def _shared(tier: Tier, spec: TierSpec, count: int) -> Tier:
    """A tier as one of the workers has it, who share a disk."""
    rates = {way: getattr(tier, way) for way in _WAYS}
    share = count if spec.medium == "disk" else 1
    part = {way: replace(r, value=r.value / share) for way, r in rates.items() if r is not None}
    return replace(tier, bytes=spec.bytes, **part)
