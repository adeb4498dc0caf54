"""A cluster from one line: "128 x 8 A100-SXM-80 @ 25GB/s", "TPU-v5p 4x4x8", "this", or a file.

    SPEC   := [WORKERS x] this | [WORKERS x] FILE.yaml | PART (+ PART)* [@ RATE]
    PART   := [NODES x] [DEVICES x] DEVICE | TPU AxBxC | TIER
              | [WORKERS x] this | [WORKERS x] FILE.yaml, of which several are unlike machines
    TIER   := SIZE host [RATE] [memory RATE] | disk RATE [SIZE]
    RATE   := NUMBER B/s, with k, M, G, T or Ki, Mi, Gi, Ti before it; b/s counts bits
    SIZE   := NUMBER B, likewise

The rate behind @ is that of one device to other nodes, in one direction; of a host the first is a
device's link to it, that behind `memory` what its processor reads and writes there. WORKERS of one
machine share its processor and its memory, or have a device each where it has devices.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from outsize import typed
from outsize.errors import OutsizeError
from outsize.hardware.cluster import (
    FAR,
    NEAR,
    Cluster,
    Group,
    Level,
    latency,
    of_machine,
    rated,
    square,
)
from outsize.hardware.devices import ROWS
from outsize.hardware.form import loads
from outsize.hardware.hardware import Device, Hardware, Rate, Tier
from outsize.hardware.named import catalogue, known
from outsize.hardware.shared import shared
from outsize.texts import read_text

SAID = "said"  # the source of a rate that the user gave
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    name + "i": 1024.0**power for power, name in enumerate("KMGT", 1)
}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_COUNTS = re.compile(r"^((?:\d+\s*[xX×]\s*)*(?:\d+\s+)?)([A-Za-z].*)$")
_TORUS = re.compile(r"^(\S+)\s+(\d+(?:[xX×]\d+)+)$")
_MACHINE = re.compile(r"^(?:(\d+)\s*[xX×]\s*)?(this|[^+@]*\.(?:yaml|yml|json))$", re.IGNORECASE)
_LARGEST = 10_000_000  # devices


def parse_spec(text: str) -> Cluster:
    """The cluster that a SPEC describes. Raises OutsizeError, one line, for one that is none."""
    said = text.strip()
    machine = _MACHINE.match(said)
    if machine is not None:
        return _worked(machine[2], None if machine[1] is None else int(machine[1]), text)
    body, at, rate = said.partition("@")
    outside = parse_rate(rate.strip(), "@") if at else None
    groups, tiers = list[Group](), []
    for part in map(str.strip, body.split("+")):
        machine = _MACHINE.match(part)
        if machine is not None:  # one of several
            count = None if machine[1] is None else int(machine[1])
            groups += _worked(machine[2], count, text).groups
            continue
        found = _part(part, text)
        if isinstance(found, Tier):
            tiers.append(found)
        else:
            groups.append(found)
    if not groups:
        raise OutsizeError(f"hardware {text!r} names no device; expected as '8xH100-SXM'")
    if outside is not None:
        _refuse_alone(groups, text)
        groups = [_joined(group, outside) for group in groups]
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise OutsizeError(f"hardware {text!r}: tiers {', '.join(names)}; expected each once")
    return Cluster(tuple(groups), tuple(tiers))


def _worked(what: str, workers: int | None, spec: str) -> Cluster:
    """One machine, this or a file's, or so many workers of it."""
    from outsize.hardware.probe import probe

    found = probe() if what.lower() == "this" else _read(what)
    made = found if isinstance(found, Cluster) else of_machine(found)
    if workers is None:
        return made
    machines = made.nodes if isinstance(found, Cluster) else found.machines
    if machines > 1:
        raise OutsizeError(f"hardware {spec!r}: {machines} machines in it; expected one")
    hardware = found.hardware() if isinstance(found, Cluster) else found
    if workers < 1:
        raise OutsizeError(f"hardware {spec!r}: a count of 0; expected 1 or more")
    if hardware.devices[0].apart and workers > made.count:
        raise OutsizeError(f"hardware {spec!r}: {made.count} devices are there; expected no more")
    made = of_machine(replace(shared(hardware, workers), rates=()))
    (group,) = made.groups
    level = replace(group.levels[0], size=workers)
    return rated(replace(made, groups=(replace(group, levels=(level,)),)), hardware.rates)


@dataclass(frozen=True)
class File:
    """A cluster's file. rates: from each node to each in `unit`, or from each device of one machine
    to each; price: money an hour, and watts, of one device in use; date, source: of the rates."""

    spec: str
    rates: tuple[tuple[float, ...], ...] = ()
    unit: str = "GB/s"
    price: float | None = None
    watts: float | None = None
    source: str = "file"
    date: str = ""


def read_cluster(path: str | Path) -> Cluster:
    """A cluster from a file: a machine, or several, as `outsize probe --out` and
    `outsize.hardware.dumps` write it, or a `spec` with what was measured of it."""
    found = _read(path)
    return found if isinstance(found, Cluster) else of_machine(found)


def _read(path: str | Path) -> Hardware | Cluster:
    text = read_text(path, "name a YAML file of hardware")
    values = typed.load_yaml(text, str(path))
    if not isinstance(values, dict) or "spec" not in values:
        return loads(text, str(path))
    file: File = typed.read(File, values, str(path))
    if re.search(r"\.(ya?ml|json)\b", file.spec, re.IGNORECASE):
        raise OutsizeError(
            f"{path}: spec: {file.spec!r} is a file; expected devices, as '2 x 8 H100-SXM'"
        )
    made = parse_spec(file.spec)
    scale = parse_rate(f"1{file.unit}", f"{path}: unit").value
    alone = made.nodes == 1 and len(file.rates) == made.count
    square(file.rates, made.count if alone else made.nodes, f"{path}: rates", file.unit)
    rates = tuple(tuple(value * scale for value in row) for row in file.rates)
    groups = tuple(replace(g, device=_priced(g.device, file, str(path))) for g in made.groups)
    made = replace(made, groups=groups, source=file.source)
    if alone:
        made = rated(made, rates)
    return replace(made, rates=rates)


def _priced(device: Device, file: File, path: str) -> Device:
    for name, value in (("price", file.price), ("watts", file.watts)):
        if value is not None and value <= 0:
            raise OutsizeError(f"{path}: {name} is {value}; expected more than 0")
    if file.price is not None:
        device = replace(device, price=Rate(file.price, "money/h", file.source, file.date))
    if file.watts is not None:
        device = replace(device, watts=Rate(file.watts, "W", file.source, file.date))
    return device


# -- numbers with units ----------------------------------------------------------------------------


def parse_rate(text: str, what: str) -> Rate:
    """Bytes a second from "25GB/s" or "200 Gb/s"."""
    return Rate(_number(text, what, r"([kMGT]|[KMGT]i)?(B|b)/s", "as 25GB/s"), "B/s", SAID, "")


def parse_size(text: str, what: str) -> int:
    """Bytes from "64GiB"."""
    return int(_number(text, what, r"([kMGT]|[KMGT]i)?(B)", "as 64GiB"))


def _number(text: str, what: str, unit: str, example: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*{unit}", text)
    if match is None:
        bare = re.fullmatch(_NUMBER, text)
        wrong = "has no unit" if bare else "is not a number with a unit"
        raise OutsizeError(f"hardware: {what} {text!r} {wrong}; expected {example}")
    value = float(match[1]) * _PREFIX[match[2] or ""] / (8 if match[3] == "b" else 1)
    if not 0 < value < math.inf:
        raise OutsizeError(f"hardware: {what} is {text!r}; expected more than 0")
    return value


# -- parts -----------------------------------------------------------------------------------------


def _part(text: str, spec: str) -> Group | Tier:
    tier = _tier(text)
    if tier is not None:
        return tier
    counts = _COUNTS.match(text)
    if counts is None:
        raise OutsizeError(f"hardware {spec!r}: {text!r} is no device; expected as '8xH100-SXM'")
    numbers = [int(each) for each in re.findall(r"\d+", counts[1])]
    if len(numbers) > 2:
        raise OutsizeError(f"hardware {spec!r}: {text!r} has {len(numbers)} counts; at most 2")
    if 0 in numbers:
        raise OutsizeError(f"hardware {spec!r}: a count of 0; expected 1 or more")
    if math.prod(numbers) > _LARGEST:
        raise OutsizeError(f"hardware {spec!r}: {math.prod(numbers):,} devices; at most 10 million")
    torus = _TORUS.match(counts[2])
    if torus is not None:
        return _torus(torus[1], tuple(int(n) for n in re.findall(r"\d+", torus[2])), numbers, spec)
    name = known(counts[2].strip())
    if len(numbers) == 2:
        return _group(name, numbers[1], numbers[0])
    count, domain = (numbers or [1])[0], ROWS[name].domain
    if domain and count > domain and count % domain:
        raise OutsizeError(
            f"hardware {spec!r}: {count} devices are no whole machines of {domain};"
            f" expected as '2 x {domain} {name}'"
        )
    if domain and count > domain:
        return _group(name, domain, count // domain)
    return _group(name, count, 1)


def _tier(text: str) -> Tier | None:
    """Host memory or a disk; None for what is neither."""
    words = text.split()
    if "host" in words[:2]:
        return _host(words, text)
    if words and words[0] == "disk":
        if len(words) not in (2, 3):
            raise OutsizeError(f"hardware: {text!r}; expected a rate, as 'disk 5GB/s'")
        rate = parse_rate(words[1], "disk")
        size = parse_size(words[2], "disk") if len(words) == 3 else 1 << 50
        return Tier("disk", size, rate, rate)
    return None


def _host(words: list[str], text: str) -> Tier:
    """Host memory: of what size, behind what link, and how fast for its own processor."""
    rest, own = words, None
    if len(words) > 2 and words[-2] == "memory":
        rest, own = words[:-2], parse_rate(words[-1], "rate of the host's own memory")
    if len(rest) not in (2, 3):
        raise OutsizeError(
            f"hardware: {text!r}; expected as '64GiB host 25GB/s memory 100GB/s', rates where known"
        )
    link = parse_rate(rest[2], "host memory") if len(rest) == 3 else None
    size = parse_size(rest[1 - rest.index("host")], "host memory")
    return Tier("host", size, link, link, own)


def _group(name: str, each: int, nodes: int) -> Group:
    """nodes machines with so many devices each, over the catalogue's links."""
    made = catalogue(name)
    inside, outside = made.links
    row = ROWS[name]
    if row.torus:
        side = each * nodes
        return Group(made.devices[0], (_ring(inside.bandwidth, (side,), row.torus),))
    levels = []
    if each > 1 or nodes == 1:
        levels.append(Level(inside.name, each, inside.bandwidth, latency(NEAR)))
    if nodes > 1:
        levels.append(Level(outside.name, nodes, outside.bandwidth, latency(FAR)))
        if each == 1:
            levels.insert(0, Level(inside.name, 1, inside.bandwidth, latency(NEAR)))
    return Group(made.devices[0], tuple(levels))


def _torus(word: str, dims: tuple[int, ...], numbers: list[int], spec: str) -> Group:
    """A slice of a torus, or several of them."""
    name = known(word)
    row = ROWS[name]
    shape = "x".join(map(str, dims))
    if not row.torus:
        raise OutsizeError(
            f"hardware {spec!r}: {name} has no torus; expected as '4 x 8 {name}', not {shape}"
        )
    if len(dims) > row.torus:
        raise OutsizeError(
            f"hardware {spec!r}: {shape} has {len(dims)} dimensions; {name} has {row.torus}"
        )
    if 0 in dims:
        raise OutsizeError(f"hardware {spec!r}: a count of 0; expected 1 or more")
    chips = math.prod(dims)
    said, slices = (numbers or [chips])[-1], numbers[0] if len(numbers) == 2 else 1
    if said != chips:
        raise OutsizeError(f"hardware {spec!r}: a torus {shape} has {chips} chips; expected {said}")
    made = catalogue(name)
    levels = [_ring(made.links[0].bandwidth, dims, row.torus)]
    if slices > 1:
        levels.append(Level("network", slices, made.links[1].bandwidth, latency(FAR)))
    return Group(made.devices[0], tuple(levels))


def _ring(bandwidth: Rate, dims: tuple[int, ...], most: int) -> Level:
    """A torus: of the chip's links those along its own dimensions are used."""
    used = sum(1 for dim in dims if dim > 1) or 1
    mine = replace(bandwidth, value=bandwidth.value * used / most)
    shape: Literal["torus"] = "torus"
    return Level("ici", math.prod(dims), mine, latency(NEAR), shape, dims)


def _refuse_alone(groups: list[Group], spec: str) -> None:
    """A rate to other nodes where there is one node says nothing."""
    if len(groups) == 1 and len(groups[0].levels) == 1:
        raise OutsizeError(
            f"hardware {spec!r}: one machine has no rate to others;"
            f" expected as '2 x 8 {groups[0].device.name} @ 25GB/s'"
        )


def _joined(group: Group, rate: Rate) -> Group:
    """With this rate to other nodes."""
    *inner, last = group.levels
    if len(group.levels) == 1:
        return replace(group, levels=(last, Level("network", 1, rate, latency(FAR))))
    return replace(group, levels=(*inner, replace(last, bandwidth=rate)))
