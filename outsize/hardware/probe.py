"""Probe: this machine as Hardware, in about a second, and from a file the next time.

Rates are kept in the user's cache directory under what they depend on (processor, cores, threads,
PyTorch, device), unless the machine was busy with something else while they were measured.
Memory and disk that are free are asked for afresh every time.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outsize import accelerator, typed
from outsize.errors import OutsizeError
from outsize.hardware import host, measure
from outsize.hardware.disk import disk_rates
from outsize.hardware.handing import handed
from outsize.hardware.hardware import Device, Hardware, Link, Measured, Rate, Tier
from outsize.texts import write_text

TIERS = ("device", "host", "disk")
FORMAT = 8  # raised when what is measured, or how, changes


def probe(
    device: str | None = None,
    quick: bool = True,
    *,
    directory: str | Path = ".",
    cache: str | Path | None = None,
    timer: measure.Timer = measure.best_of,
    fresh: bool = False,
) -> Hardware:
    """This machine: its devices of one kind ("cpu", or the accelerator that
    PyTorch finds, None for the best), tiers, links.

    quick=False also takes large shapes and the bandwidth of the disk under directory (256 MiB are
    written there for a moment). cache: the folder of kept rates, else the user's. On a CPU both
    the device tier and the host tier lie in the memory of the host: what is free is free once, and
    a copy between them is one within it.
    fresh: measured anew whatever is kept. Raises OutsizeError for a device that is not there.
    """
    target = accelerator.find(device)
    key = _key(target, quick, directory)
    path = _cache_file(key, cache)
    hardware = None if fresh else _kept(path, key)
    if hardware is None:
        loaded = host.busy()  # before the probe adds its own load
        hardware = _measure(target, quick, directory, timer)
        if not loaded:
            _keep(path, key, hardware)
    return _refreshed(hardware, target, directory)


def keep(hardware: Hardware, device: str = "cpu", *, cache: str | Path | None = None) -> None:
    """Have the next quick probes of this machine give these rates instead of measuring any: where
    a machine is never idle, or its rates are known better.

    hardware: one device, and no other tiers than a probe finds: OutsizeError.
    """
    others = sorted({tier.name for tier in hardware.tiers} - set(TIERS))
    if len(hardware.devices) != 1 or others:
        raise OutsizeError(
            f"hardware: {len(hardware.devices)} devices and the tiers"
            f" {', '.join(tier.name for tier in hardware.tiers)}; expected one device, and tiers"
            f" among {', '.join(TIERS)}: declare others with --tier"
        )
    key = _key(accelerator.find(device), True, ".")
    _keep(_cache_file(key, cache), key, hardware)


def user_cache() -> Path:
    """The user's cache directory for Outsize (the XDG convention)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outsize"


def _name(target: torch.device) -> str:
    if not accelerator.queues(target):
        return host.processor()
    of = getattr(torch.get_device_module(target), "get_device_name", None)
    return target.type if of is None else str(of(target))


def _count(target: torch.device) -> int:
    return torch.accelerator.device_count() if accelerator.queues(target) else 1


def _key(target: torch.device, quick: bool, directory: str | Path) -> dict[str, Any]:
    """Everything that the rates depend on, as JSON."""
    return {
        "format": FORMAT,
        "device": _name(target),
        "devices": _count(target),
        "processor": host.processor(),
        "cores": host.granted(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "disk": None if quick else str(Path(directory).resolve()),
    }


def _cache_file(key: dict[str, Any], cache: str | Path | None) -> Path:
    folder = user_cache() if cache is None else Path(cache)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"hardware-{digest[:16]}.json"


def _kept(path: Path, key: dict[str, Any]) -> Hardware | None:
    """What was kept for this key; None where nothing was, or the file is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("key") != key:
            return None
        found: Hardware = typed.read(Hardware, data.get("hardware"), str(path))
        return found
    except (OSError, ValueError, RecursionError):
        return None


def _keep(path: Path, key: dict[str, Any], hardware: Hardware) -> None:
    """A folder that cannot be written costs the next probe a second, which is no reason to fail
    this one."""
    text = json.dumps({"key": key, "hardware": typed.plain(hardware)}, indent=1)
    with contextlib.suppress(OSError, OutsizeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(text, path)


def _measure(
    target: torch.device, quick: bool, directory: str | Path, timer: measure.Timer
) -> Hardware:
    date = datetime.date.today().isoformat()
    apart = accelerator.queues(target)
    matmul = tuple(measure.matmuls(target, quick, timer, date))
    peak: dict[str, Rate] = {}
    for entry in matmul:
        if entry.dtype not in peak or entry.rate.value > peak[entry.dtype].value:
            peak[entry.dtype] = entry.rate
    bandwidth = measure.bandwidth(target, timer, date)
    granted = host.granted()
    found = Measured(
        matmul=matmul,
        attention=tuple(measure.attentions(target, quick, timer, date)),
        overhead=measure.overhead(target, timer, date),
        handed=handed(target, timer, date),
    )
    memory = Rate(_memory(target)[0], "B", "operating system", date)
    device = Device(
        name=_name(target),
        kind="gpu" if apart else "cpu",
        memory=memory,
        peak=peak,
        bandwidth=bandwidth,
        count=_count(target),
        visible=memory,
        measured=found,
        note="" if apart else f"{granted:g} cores, {torch.get_num_threads()} threads",
        cores=0 if apart else host.cores(),
        threads=0 if apart else torch.get_num_threads(),
        granted=granted if not apart and granted < host.cores() else 0.0,
    )
    tiers, links = [Tier("device", 0, bandwidth, bandwidth)], []
    if apart:
        to, back = measure.host_copies(target, timer, date)
        own = measure.bandwidth(torch.device("cpu"), timer, date)
        tiers.append(Tier("host", 0, read=to, write=back, own=own))
        links.append(Link("host", "device and host", min(to, back, key=lambda rate: rate.value)))
    else:
        copied = measure.copy(timer, date)
        tiers.append(Tier("host", 0, read=copied, write=copied))
    read, write = (None, None) if quick else disk_rates(directory, date)
    tiers.append(Tier("disk", 0, read, write))
    return Hardware((device,), tuple(tiers), tuple(links), "probe")


def _memory(target: torch.device) -> tuple[int, int]:
    """(total, free) bytes of a device as this process sees them."""
    if accelerator.queues(target):
        free, total = torch.accelerator.get_memory_info(target)
        return total, free
    memory = host.memory()
    return memory.total, memory.available


def _refreshed(hardware: Hardware, target: torch.device, directory: str | Path) -> Hardware:
    """The same rates with the memory and the disk that are free now."""
    reserved = accelerator.reserved(target)
    total, free = _memory(target)
    free += reserved  # which a plan has among its own
    sizes = dict(
        zip(TIERS, (free, host.memory().available, host.disk_free(directory)), strict=True)
    )
    (device,) = hardware.devices
    seen = replace(device.memory, value=float(total))
    grain = accelerator.grain(target)
    device = replace(device, memory=seen, visible=seen, grain=grain, reserved=reserved)
    return replace(
        hardware,
        devices=(device,),
        tiers=tuple(replace(tier, bytes=sizes[tier.name]) for tier in hardware.tiers),
    )
