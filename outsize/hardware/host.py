"""What the operating system says of this machine: processor, memory that may be used, disk.

Memory and processor time are what a cgroup (version 1 or 2, every level up to the root) and the
process's own limits leave, not what the whole machine has.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from outsize.errors import OutsizeError

MAPPED = 1 << 20  # bytes of a buffer from which it is a mapping of its own, where memory is short
UNLIMITED = 2**60  # version 1 writes its "no limit" as a number near 2^63
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST = 32 << 20  # bytes of the largest buffer that glibc may be told to keep in its heap
KEPT = 32  # of the machine's memory, the part that a process may keep though it is free
PROC = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux's mman.h
_NEAR = 1 << 16  # bytes between buffers that may share a huge page: what an allocator puts there


@dataclass(frozen=True)
class Memory:
    """Bytes: total is the most this process may ever hold, available what it may take now."""

    total: int
    available: int


def processor() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cores(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Cores that this process can keep busy, the last of them perhaps in part."""
    return math.ceil(granted(proc, mount))


def granted(proc: Path = PROC, mount: Path = MOUNT) -> float:
    """Cores' worth of time that this process may take: all that it may run on, or what the quota of
    a control group leaves of them."""
    try:
        own = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        own = os.cpu_count() or 1
    return min((float(own), *_quotas(proc, mount)))


def busy() -> bool:
    """Whether others kept more than half of the cores at work during the last minute."""
    return os.getloadavg()[0] > 0.5 * cores()


def memory(proc: Path = PROC, mount: Path = MOUNT) -> Memory:
    """What is left of the machine's memory under every limit on this process."""
    machine = psutil.virtual_memory()
    found = [Memory(machine.total, machine.available), *cgroup_limits(proc, mount)]
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(Memory(most, max(0, most - _own_bytes(limit))))
    return Memory(min(m.total for m in found), min(m.available for m in found))


def own_mappings(nbytes: int = MAPPED) -> None:
    """From here on buffers of so many bytes go back to the system when they are freed, where the C
    library is glibc. By itself it raises that bound to as much as it has seen freed, 32 MiB at
    most, and what is smaller lies in a heap that keeps its holes (docs/log.md)."""
    _mallopt(_MMAP_THRESHOLD, nbytes)


def keep_freed(nbytes: int | None = None) -> None:
    """From here on the heap keeps up to so many freed bytes, a part of the machine's memory where
    none are said, where the C library is glibc. By itself it gives back what is beyond 64 MiB, and
    the next step of a training waits until the system has given that again, page by page."""
    most = memory().total // KEPT if nbytes is None else nbytes
    _mallopt(_MMAP_THRESHOLD, _LARGEST)
    _mallopt(_TRIM_THRESHOLD, min(most, 2**31 - 1))


def _mallopt(name: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(name, value)


def huge(folder: Path = HUGE) -> int:
    """Bytes of a huge page, 0 where the system gives none to who asks."""
    with suppress(OSError, ValueError):
        if "[never]" not in (folder / "enabled").read_text(encoding="ascii"):
            return int((folder / "hpage_pmd_size").read_text(encoding="ascii"))
    return 0


def ask_huge(address: int, nbytes: int) -> None:
    """Have memory that nobody has touched come in huge pages. Who reads much of it for each token
    reads a fifth faster: a page of 4 KiB is found by several reads, by a guest of twice as many."""
    _advise(huge(), address, address + nbytes, _MADV_HUGEPAGE)


def gather_huge(spans: Iterable[tuple[int, int]]) -> None:
    """Have what lies in memory lie in huge pages, of which each is copied once: whoever reads there
    waits as long. spans: the address and bytes of each buffer."""
    size, (first, last) = huge(), (0, 0)
    for address, nbytes in (*sorted(spans), (2**62, 0)):
        if address - last > _NEAR:
            _advise(size, first, last, _MADV_COLLAPSE)
            first = address
        last = max(last, address + nbytes)


def _advise(size: int, address: int, stop: int, how: int) -> None:
    """Tell the system so of whole huge pages in a range; it may not heed it."""
    first = -(-address // size) * size if size else stop
    if stop - first >= size > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, (stop - first) // size * size, how)


def disk_free(directory: str | Path) -> int:
    """Free bytes of the disk that holds a directory. Raises OutsizeError when there is none."""
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise OutsizeError(
            f"{directory}: cannot ask for its free space ({error.strerror}); name a folder"
        ) from None


def cgroup_limits(proc: Path = PROC, mount: Path = MOUNT) -> Iterator[Memory]:
    """The limit of each level of the process's memory cgroup that has one.

    Pages of files that nothing uses count as available, since the kernel drops them first.
    """
    files = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for version, level in _levels("memory", proc, mount):
        limit, usage, dropped = files[version]
        most = _number(level / limit)
        if most is not None and most < UNLIMITED:
            used = (_number(level / usage) or 0) - _stat(level / "memory.stat", dropped)
            yield Memory(most, max(0, most - max(0, used)))


def _quotas(proc: Path, mount: Path) -> Iterator[float]:
    """Cores' worth of time of each level that has a quota: so much of every period."""
    for version, level in _levels("cpu", proc, mount):
        if version == 2:
            quota, period = _pair(level / "cpu.max")
        else:
            quota = _number(level / "cpu.cfs_quota_us")
            period = _number(level / "cpu.cfs_period_us")
        if quota and period and quota > 0:  # version 1 writes its "no quota" as -1
            yield quota / period


def _levels(controller: str, proc: Path, mount: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) from the process's own group up to the root. Inside a container the path
    may be that of the machine outside, which is not there: then the root is the group."""
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, alone or beside version 1
            found = [(2, mount), (2, mount / "unified")]
        else:
            found = [(1, mount / controllers)] if controller in controllers.split(",") else []
        for version, root in found:
            folder = root / path.lstrip("/")
            folder = folder if folder.is_dir() else root
            for level in (folder, *folder.parents):
                yield version, level
                if level == root:
                    break


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _pair(path: Path) -> tuple[int | None, int | None]:
    """Two numbers in a file; None where it says "max", or there is none."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return None, None


def _stat(path: Path, name: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass  # without the file nothing is known to be droppable
    return 0


def _own_bytes(limit: int) -> int:
    """What this process holds already of a limit on its address space or its data."""
    held = psutil.Process().memory_info()
    return int(held.vms if limit == resource.RLIMIT_AS else getattr(held, "data", held.rss))
