"""The disk tier's streaming bandwidth against that of the bare disk, measured in the same run.

Both move the same bytes of the same memory, in turn: the bare disk by direct system calls over one
preallocated file, in the probe's shape (and in others, shown beside); the tier by DiskStore, which
cuts, checksums and verifies. Target: 0.9 of the bare disk in the probe's shape, both ways; exit
code 1 below it. Checksums take a core a third as long as the fastest writes, which the bare disk
leaves free: let the machine be quiet.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from outsize.hardware.disk import OPERATION, THREADS, open_direct, preallocate
from outsize.memory.disk import DiskStore, staging_bytes
from outsize.memory.sizes import format_bytes, parse_bytes
from outsize.memory.store import pool

TARGET = 0.9
SHAPES = ((OPERATION, THREADS), (4 * OPERATION, 1), (4 * OPERATION, 2), (4 * OPERATION, 4))
WAYS = ("write", "read")


def bare(handle: int, memory: memoryview, way: str, block: int, threads: int) -> None:
    """Memory to or from the start of a file, block bytes a call."""
    call = os.pwritev if way == "write" else os.preadv

    def operation(offset: int) -> None:
        piece = memory[offset : offset + block]
        if call(handle, [piece], offset) != len(piece):
            raise SystemExit("the system moved less than it was asked to")

    with ThreadPoolExecutor(threads) as team:
        list(team.map(operation, range(0, len(memory), block)))


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(folder: Path, size: int, rounds: int) -> tuple[dict[tuple[str, str], float], bool]:
    """(least seconds by (contender, way), whether the disk has direct I/O)."""
    buffer = pool(size).random_()
    memory = memoryview(buffer.numpy())
    handle, direct = open_direct(folder)
    preallocate(handle, 0, size)
    store = DiskStore("disk", [folder], size)
    place = store.reserve(size)
    best: dict[tuple[str, str], float] = {}
    for turn in range(rounds + 1):  # the first converts fresh extents and is not counted
        for way in WAYS:
            tier = store.write if way == "write" else store.read
            works: dict[str, Callable[[], object]] = {
                f"bare, {block >> 20} MiB x {threads}": (
                    lambda way=way, b=block, t=threads: bare(handle, memory, way, b, t)
                )
                for block, threads in SHAPES
            }
            works["tier"] = lambda tier=tier: tier(place, buffer)
            for name, work in works.items():
                spent = seconds(work)
                if turn:
                    best[name, way] = min(best.get((name, way), spent), spent)
    store.close()
    os.close(handle)
    return best, direct


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size", type=parse_bytes, default=512 << 20)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    busy = psutil.cpu_percent(interval=1.0)
    best, direct = measure(options.directory, options.size, max(1, options.rounds))
    print(
        f"{format_bytes(options.size)} under {options.directory},"
        f" {'direct' if direct else 'buffered'} I/O, least of {options.rounds} rounds;"
        f" {os.cpu_count()} cores, {busy:.0f}% busy with something else"
    )
    good = True
    for way in WAYS:
        rates = {name: options.size / s / 1e9 for (name, w), s in best.items() if w == way}
        tier = rates.pop("tier")
        ratio = tier / next(iter(rates.values()))  # of SHAPES[0], the probe's
        good = good and ratio >= TARGET
        listed = "; ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
        print(f"{way:5} GB/s  tier {tier:.2f}; {listed}")
        print(
            f"{'':5}       {ratio:.2f} of the bare disk as probed, target {TARGET}:"
            f" {'met' if ratio >= TARGET else 'MISSED'};"
            f" {tier / max(rates.values()):.2f} of the fastest shape"
        )
    print(f"buffers of the tier: {format_bytes(staging_bytes())}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
