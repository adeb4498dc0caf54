"""Tiers as they are declared, and the stores behind them.

    --host-memory 4GiB            RAM beside the device's budget: the tier "host"
    --disk DIR[,DIR...][:SIZE]    spill files in folders, striped over several: the tier "disk"
    --tier NAME=PATH:SIZE         memory with a path: CXL, another NUMA node, a file in /dev/shm

SIZE:pageable is of memory that is used as it is where it cannot be page-locked for an accelerator.
A declaration says where bytes may rest and how many. Whoever opens the stores gives the bytes that
the plan needs, by `dataclasses.replace`, since a store in memory takes all of them.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from outsize import accelerator
from outsize.accelerator import NotLocked
from outsize.errors import OutsizeError
from outsize.hardware import Rate, Tier, host
from outsize.hardware.disk import disk_rates
from outsize.hardware.hardware import NAME
from outsize.memory.disk import DiskStore
from outsize.memory.sizes import parse_bytes
from outsize.memory.store import MemoryStore, Store, pool

PAGEABLE = ":pageable"  # behind a size
SAFETY = 0.9  # of a disk's free space, where no size is given: logs and checkpoints grow as well
RESERVED = ("device", "host", "disk")
SAMPLE = 128 << 20  # bytes moved to measure a tier in memory: more than caches hold
ROUNDS = 3
HOST = torch.device("cpu")


@dataclass(frozen=True)
class TierSpec:
    """One tier as declared. paths: none for RAM, one for memory with a path, folders of a disk.
    pageable: memory that cannot be page-locked is used as it is."""

    name: str
    medium: Literal["memory", "disk"]
    paths: tuple[Path, ...]
    bytes: int
    pageable: bool = False

    def __post_init__(self) -> None:
        if self.bytes <= 0:
            raise OutsizeError(f"tier {self.name!r}: {self.bytes} bytes, expected more than none")


def host_tier(text: str) -> TierSpec:
    """What `--host-memory` says. OutsizeError for more than this process may ever hold."""
    said = text.removesuffix(PAGEABLE)
    size = _size("--host-memory", text, said)
    total = host.memory().total
    if size > total:
        raise OutsizeError(
            f"--host-memory {text}: {size:,} bytes, but this process may hold {total:,}"
            f" ({size - total:,} missing); ask for less"
        )
    return TierSpec("host", "memory", (), size, said != text)


def disk_tier(text: str, near: int = 1) -> TierSpec:
    """What `--disk` says for each of `near` workers of this machine; without a size, its part of
    SAFETY times what is free. OutsizeError for a folder that is not there or is named twice."""
    listed, size = _split("--disk", text)
    folders = tuple(Path(part) for part in listed.split(","))
    for folder in folders:
        if not listed or not folder.is_dir():
            raise OutsizeError(
                f"--disk {text}: {str(folder)!r} is not a folder; make it, or name one that is"
                " there, as DIR:SIZE or DIR,DIR:SIZE"
            )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise OutsizeError(f"--disk {text}: a folder is named twice; name each once")
    return TierSpec(
        "disk", "disk", folders, max(1, _free(folders) // near) if size is None else size
    )


def memory_tier(text: str) -> TierSpec:
    """What `--tier` says. OutsizeError where it has another form or a name that is taken."""
    name, equals, rest = text.partition("=")
    said = rest.removesuffix(PAGEABLE)
    path, size = _split("--tier", said) if equals else ("", None)
    if not re.fullmatch(NAME, name) or not path or size is None:
        raise OutsizeError(f"--tier {text}: expected NAME=PATH:SIZE, such as cxl=/mnt/cxl:64GiB")
    if name in RESERVED:
        raise OutsizeError(f"--tier {text}: {name!r} is a tier already; choose another name")
    return TierSpec(name, "memory", (Path(path),), size, said != rest)


@contextmanager
def open_stores(
    specs: Iterable[TierSpec], device: torch.device = HOST, tell: Callable[[str], Any] = str
) -> Iterator[dict[str, Store]]:
    """The stores of these tiers by name, all closed at the end, whatever ends it.

    device: of the run; memory is page-locked where it is an accelerator. tell: is told
    in a line of pageable memory that cannot be. OutsizeError where a store cannot be opened.
    """
    specs, pinned = tuple(specs), accelerator.queues(device)
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            raise OutsizeError(f"tier {name!r} is declared {count} times; declare it once")
    with ExitStack() as stack:
        made = ((spec.name, _found(spec, pinned, tell)) for spec in specs)
        yield {name: stack.enter_context(closing(store)) for name, store in made}


def measured(spec: TierSpec, date: str, clock: Callable[[], float] = time.perf_counter) -> Tier:
    """The tier with the rates at which its store reads and writes, found by doing so; the same for
    planning as what the probe finds. Striped folders are as fast as the slowest times their number;
    those on one disk share it. OutsizeError where it cannot be opened.
    """
    if spec.medium == "memory":
        return Tier(spec.name, spec.bytes, *_memory_rates(spec, date, clock))
    ways = zip(*(disk_rates(folder, date, clock=clock) for folder in spec.paths), strict=True)
    read, write = (_together(rates, spec.paths) for rates in ways)
    return Tier(spec.name, spec.bytes, read, write)


def own_rate(spec: TierSpec, date: str, clock: Callable[[], float] = time.perf_counter) -> Rate:
    """B/s at which this host's processor reads and writes memory of a tier where it lies, as an
    update does: a = b + s c over a third of SAMPLE each. OutsizeError where it cannot be opened."""
    size = min(SAMPLE, spec.bytes) // 12 * 12
    with open_stores([replace(spec, bytes=size)]) as stores:
        store = stores[spec.name]
        assert isinstance(store, MemoryStore)
        a, b, c = store.view(store.reserve(size)).view(torch.float32).chunk(3)
        spent = []
        for _ in range(ROUNDS):
            start = clock()
            torch.add(b, c, alpha=3.0, out=a)
            spent.append(clock() - start)
        del a, b, c
    return Rate(size / min(spent), "B/s", "probe", date, note="triad")


def _together(rates: Sequence[Rate], folders: tuple[Path, ...]) -> Rate:
    """The rate of all folders, each taking an equal share, from the rate of each alone."""
    shares = [r.value / on for r, on in zip(rates, _on_its_disk(folders), strict=True)]
    return replace(rates[0], value=min(shares) * len(folders))


def _memory_rates(spec: TierSpec, date: str, clock: Callable[[], float]) -> tuple[Rate, Rate]:
    """(read, write) between the tier and RAM, by one thread, the best of ROUNDS."""
    size = min(SAMPLE, spec.bytes)
    with open_stores([replace(spec, bytes=size)]) as stores:
        store, data = stores[spec.name], pool(size)
        place = store.reserve(size)
        spent: dict[str, list[float]] = {"read": [], "write": []}
        for _ in range(ROUNDS):
            for way, move in (("write", store.write), ("read", store.read)):
                start = clock()
                move(place, data)
                spent[way].append(clock() - start)
    note = "copied by one thread"
    read, write = (
        Rate(size / min(spent[way]), "B/s", "probe", date, note=note) for way in ("read", "write")
    )
    return read, write


def _found(spec: TierSpec, pinned: bool, tell: Callable[[str], Any]) -> Store:
    try:
        return _opened(spec, pinned)
    except NotLocked as error:
        if not spec.pageable:
            raise
        store = _opened(spec, False)
        tell(f"{error.found}: used as it is, and its copies do not run beside the computation")
        return store


def _opened(spec: TierSpec, pinned: bool) -> Store:
    if spec.medium == "disk":
        return DiskStore(spec.name, spec.paths, spec.bytes, pinned=pinned)
    path = spec.paths[0] if spec.paths else None
    return MemoryStore(spec.name, spec.bytes, pinned, path)


def _free(folders: tuple[Path, ...]) -> int:
    """Bytes that equal shares in all folders may take together."""
    shares = zip(folders, _on_its_disk(folders), strict=True)
    return int(SAFETY * min(host.disk_free(f) // on for f, on in shares)) * len(folders)


def _on_its_disk(folders: tuple[Path, ...]) -> list[int]:
    """For each folder how many of them lie on the same disk."""
    disks = [folder.stat().st_dev for folder in folders]
    return [disks.count(disk) for disk in disks]


def _split(option: str, text: str) -> tuple[str, int | None]:
    """(what is before the size, the size); a colon before anything but a digit is a name's own."""
    match = re.fullmatch(r"(.*):(\d[^/]*)", text)
    if match is None:
        return text, None
    return match[1], _size(option, text, match[2])


def _size(option: str, text: str, size: str) -> int:
    try:
        return parse_bytes(size)
    except OutsizeError as error:
        raise OutsizeError(f"{option} {text}: {error}") from None
