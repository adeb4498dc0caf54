"""Tables of all-reduces among the workers of several hosts: which algorithm is quickest for so many
bytes, measured when a group is made, kept for the next run on the same hosts.

The group's first worker keeps it, and all take his: so all take the same algorithm. A table is of a
group's hosts in their order as they are running, and of nobody else's links.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from outsize.collectives.c10d import C10d
from outsize.collectives.collective import DONE, AllReduce, Call, Collective, Handle
from outsize.collectives.pieces import flattened
from outsize.collectives.small import ALGORITHMS, Algorithm
from outsize.errors import OutsizeError

SIZES = (256, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20)  # bytes
ROUNDS = 3
LEAST_BYTES = "ring"
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """Seconds of an all-reduce of so many bytes by an algorithm."""

    algorithm: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Table:
    """What all-reduces take among `size` workers, measured. The same on all of them."""

    size: int
    rows: tuple[Row, ...]

    @cached_property
    def _known(self) -> dict[str, list[tuple[int, float]]]:
        """Bytes and seconds by algorithm, in order."""
        names = sorted({row.algorithm for row in self.rows})
        return {
            n: sorted((r.bytes, r.seconds) for r in self.rows if r.algorithm == n) for n in names
        }

    def seconds(self, algorithm: str, count: int) -> float:
        """Between the measured sizes, and beyond them along the last two."""
        known = self._known[algorithm]
        at = min(max(bisect_left(known, (count, 0.0)), 1), len(known) - 1)
        (low, first), (high, last) = known[at - 1], known[at]
        return max(first + (last - first) * (count - low) / (high - low), 0.0)

    def best(self, count: int) -> str:
        """The quickest algorithm for so many bytes; beyond those measured, that of least bytes."""
        if count > max(row.bytes for row in self.rows):
            return LEAST_BYTES
        return min(self._known, key=lambda name: (self.seconds(name, count), name))


def measure(group: C10d, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Table:
    """The table of a group: least seconds of the rounds, of the slowest worker. All call it."""
    rows = [
        Row(name, size, _least(group, algorithm, size, rounds))
        for size in sizes
        for name, algorithm in ALGORITHMS.items()
    ]
    slowest = group.all_reduce(torch.tensor([r.seconds for r in rows], dtype=torch.float64), "max")
    return Table(
        group.size,
        tuple(Row(r.algorithm, r.bytes, s) for r, s in zip(rows, slowest.tolist(), strict=True)),
    )


def table_of(group: C10d, hosts: Sequence[str], cache: Path) -> Table:
    """The table of a group whose workers are on such hosts: a kept one, or measured and kept. All
    call it."""
    path = cache / f"sums-{_digest(hosts)}.json"
    kept = _kept(path, hosts) if group.rank == 0 else None
    cells = [(name, size) for size in SIZES for name in ALGORITHMS]
    seconds_C = torch.full((len(cells),), -1.0, dtype=torch.float64)
    if kept is not None:
        seconds_C = torch.tensor([kept[f"{name} {size}"] for name, size in cells]).double()
    found = group.broadcast(seconds_C).tolist()
    if min(found) >= 0:
        rows = (Row(name, size, s) for (name, size), s in zip(cells, found, strict=True))
        return Table(group.size, tuple(rows))
    table = measure(group)
    if group.rank == 0:
        _keep(path, hosts, table)
    return table


def _digest(hosts: Sequence[str]) -> str:
    said = json.dumps([FORMAT, torch.__version__, *hosts])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _kept(path: Path, hosts: Sequence[str]) -> dict[str, float] | None:
    """Seconds by algorithm and bytes; None where nothing was kept for these hosts, or the file is
    damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["hosts"] != list(hosts):
            return None
        wanted = [f"{name} {size}" for size in SIZES for name in ALGORITHMS]
        return {cell: max(0.0, float(data["seconds"][cell])) for cell in wanted}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _keep(path: Path, hosts: Sequence[str], table: Table) -> None:
    """A folder that cannot be written costs the next run a second."""
    seconds = {f"{row.algorithm} {row.bytes}": row.seconds for row in table.rows}
    text = json.dumps({"hosts": list(hosts), "seconds": seconds}, indent=1)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)


def _least(group: C10d, algorithm: Algorithm, size: int, rounds: int) -> float:
    flat, least = torch.zeros(max(size // 4, 1)), float("inf")
    for _ in range(rounds + 1):  # the first makes connections and buffers
        group.barrier()
        begin = time.perf_counter()
        algorithm(group, flat, "sum")
        least = min(least, time.perf_counter() - begin)
    return least


class Chosen(Collective):
    """A group whose all-reduces take the algorithm that a table of it says is quickest."""

    def __init__(self, group: C10d, table: Table) -> None:
        if table.size != group.size:
            raise OutsizeError(
                f"a table of collectives among {table.size} workers for a group of {group.size};"
                " measure it again"
            )
        self.group, self.table = group, table
        self.size, self.rank, self.received = group.size, group.rank, group.received

    def start(self, call: Call) -> Handle:
        if not isinstance(call, AllReduce):
            return self.group.start(call)
        flat, back = flattened(call.tensor)
        ALGORITHMS[self.table.best(flat.nbytes)](self.group, flat, call.operation)
        back()
        return DONE
