"""Memory limits from cgroup trees made by hand, both versions."""

from __future__ import annotations

import mmap
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from outsize.errors import OutsizeError
from outsize.hardware import host
from outsize.hardware.host import Memory

GIB = 2**30


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def limits(tmp_path: Path, proc: str, files: dict[str, object]) -> list[Memory]:
    (tmp_path / "proc").write_text(proc)
    return list(host.cgroup_limits(tmp_path / "proc", tree(tmp_path / "fs", files)))


def test_version_2_takes_every_level(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "a/memory.max": 6 * GIB,
        "a/memory.current": 5 * GIB,
        "a/memory.stat": f"anon 7\ninactive_file {GIB}",
        "a/b/memory.max": "max",
        "a/b/memory.current": GIB,
    }
    assert limits(tmp_path, "0::/a/b\n", files) == [Memory(6 * GIB, 2 * GIB)]


def test_version_1_ignores_its_word_for_no_limit(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/x/memory.limit_in_bytes": 4 * GIB,
        "memory/x/memory.usage_in_bytes": 3 * GIB,
        "memory/x/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}",
    }
    proc = "9:name=systemd:/\n4:memory:/x\n3:cpuset:/\n0::/\n"
    assert limits(tmp_path, proc, files) == [Memory(4 * GIB, 3 * GIB // 2)]


def test_inside_a_container_the_root_is_the_group(tmp_path: Path) -> None:
    files: dict[str, object] = {"memory.max": 2 * GIB, "memory.current": 3 * GIB}
    assert limits(tmp_path, "0::/outer/path\n", files) == [Memory(2 * GIB, 0)]


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert list(host.cgroup_limits(tmp_path / "none", tmp_path)) == []


TWO, SHARED = "0::/a/b\n", "9:name=systemd:/\n4:cpu,cpuacct:/a/b\n0::/\n"
AT = "cpu,cpuacct/a"


@pytest.mark.parametrize(
    ("proc", "files", "expected"),
    [
        (TWO, {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        (TWO, {"a/cpu.max": "50000 100000", "a/b/cpu.max": "20000 100000"}, 0.2),
        (TWO, {"unified/a/b/cpu.max": "5000 20000"}, 0.25),
        ("0::/outer/path\n", {"cpu.max": "75000 100000"}, 0.75),  # inside a container
        (SHARED, {f"{AT}/cpu.cfs_quota_us": 10000, f"{AT}/cpu.cfs_period_us": 20000}, 0.5),
        (SHARED, {f"{AT}/b/cpu.cfs_quota_us": -1, f"{AT}/b/cpu.cfs_period_us": 100000}, None),
        (TWO, {"a/cpu.max": "99900000 100000"}, None),  # more than there is
        (TWO, {"a/b/cpu.max": "nonsense"}, None),
    ],
)
def test_a_quota_leaves_part_of_the_cores(
    tmp_path: Path, proc: str, files: dict[str, object], expected: float | None
) -> None:
    """Of every level the least; cores are whole, and one at least."""
    (tmp_path / "proc").write_text(proc)
    tree(tmp_path / "fs", files)
    for folder in ("a/b", f"{AT}/b"):
        (tmp_path / "fs" / folder).mkdir(parents=True, exist_ok=True)
    where = (tmp_path / "proc", tmp_path / "fs")
    whole = len(os.sched_getaffinity(0))
    assert host.granted(*where) == (expected or whole)
    assert host.cores(*where) == (1 if expected else whole)


def test_memory_is_the_least_of_machine_group_and_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    none = tmp_path / "none"
    assert host.memory(none, tmp_path) == Memory(64 * GIB, 40 * GIB)
    (tmp_path / "proc").write_text("0::/\n")
    tree(tmp_path / "fs", {"memory.max": 48 * GIB, "memory.current": GIB})
    assert host.memory(tmp_path / "proc", tmp_path / "fs") == Memory(48 * GIB, 40 * GIB)

    def address_space(which: int) -> tuple[int, int]:
        return (8 * GIB, 8 * GIB) if which == resource.RLIMIT_AS else unlimited

    class Process:
        def memory_info(self) -> Any:
            return SimpleNamespace(vms=3 * GIB, rss=GIB, data=2 * GIB)

    monkeypatch.setattr(resource, "getrlimit", address_space)
    monkeypatch.setattr(psutil, "Process", Process)
    assert host.memory(none, tmp_path) == Memory(8 * GIB, 5 * GIB)


def test_this_machine() -> None:
    found = host.memory()
    assert 0 < found.available <= found.total
    assert host.cores() >= 1
    assert host.processor()
    assert host.disk_free(".") > 0
    with pytest.raises(OutsizeError, match="free space"):
        host.disk_free("/nowhere/at/all")


HOLES = """
import ctypes, os, psutil
from outsize.hardware import host

c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
c.memset.restype, c.memset.argtypes = (
    ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
)
if os.fork():  # its end is told by what it prints, before this process's own
    os.wait()
else:
    host.own_mappings()
c.free(c.malloc(16 << 20))  # glibc keeps buffers up to this size in its heap from now on
before = psutil.Process().memory_info().rss
every = [c.memset(c.malloc(4 << 20), 1, 4 << 20) for _ in range(16)]
for one in every[::2]:
    c.free(one)
print(psutil.Process().memory_info().rss - before, flush=True)
"""


def test_freed_buffers_go_back_to_the_system_and_leave_no_holes() -> None:
    """Every second one of 16 is freed, of 4 MiB each."""
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    own, kept = map(int, run.stdout.split())
    assert kept > 60 << 20
    assert own < 36 << 20


STEPS = """
import ctypes, os, psutil
from outsize.hardware import host

c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
c.memset.restype, c.memset.argtypes = (
    ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
)
for most in (0, 64 << 20, 256 << 20):
    if os.fork():
        os.wait()
        continue
    if most:
        host.keep_freed(most)
    before = psutil.Process().memory_info().rss
    for one in [c.memset(c.malloc(2 << 20), 1, 2 << 20) for _ in range(64)]:
        c.free(one)
    print(psutil.Process().memory_info().rss - before, flush=True)
    os._exit(0)
"""


def test_freed_buffers_are_kept_up_to_a_bound() -> None:
    """Of 64 buffers of 2 MiB, all freed."""
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    unsaid, beyond, within = map(int, run.stdout.split())
    assert max(unsaid, beyond) < 16 << 20
    assert within > 120 << 20


def _in_huge_pages(address: int) -> int:
    """Bytes of the mapping there, as the system says."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(match[1], 16) <= address < int(match[2], 16)
        elif here and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_memory_comes_in_huge_pages_and_moves_to_them_as_it_is(tmp_path: Path) -> None:
    """One at least of each region: the rest may be where the system has none left."""
    size = host.huge()
    if not size:
        pytest.skip("no huge pages here")
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    asked, held = (np.frombuffer(mmap.mmap(-1, 4 * size, private), np.uint8) for _ in range(2))
    host.ask_huge(asked.ctypes.data, len(asked))
    asked[:] = 1
    assert _in_huge_pages(asked.ctypes.data + size) >= size
    held[:] = np.arange(len(held), dtype=np.uint64).astype(np.uint8)
    before, where = held.copy(), held.ctypes.data
    # As buffers of an allocator lie: a few bytes apart, each smaller than a huge page.
    host.gather_huge([(where + i, size // 4 - 64) for i in range(0, 4 * size, size // 4)])
    assert _in_huge_pages(where + size) >= size and (held == before).all()
    (tmp_path / "enabled").write_text("always madvise [never]")
    assert host.huge(tmp_path) == host.huge(tmp_path / "none") == 0
