"""Does recursive doubling between hosts, under sums inside them, cut the latency of an all-reduce?

Singhania et al., "LLM Inference Beyond a Single Node", 2025 (NVRAR): 1.9 to 3.6 times lower latency
than NCCL from 128 KB to 2 MB. Li et al., "TPI-LLM", 2024: where a link's latency is all that counts
an all-reduce is best a star. Here both over emulated hosts: network namespaces, TCP over links of
one millisecond, ranks of a host over shared memory. Contenders, all of float32:

    flat ring   gloo's all-reduce over all ranks, which knows no hosts
    two levels  shared memory inside the hosts, gloo's ring between them
    NVRAR       shared memory inside, recursive doubling between
    star        shared memory inside, everyone to one host and back
    table       what the product does: between the hosts what the table says that it measured

Sizes are of the whole tensor; seconds are of the slowest rank, least of the rounds, in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time

import torch
from hosts import Hosts
from torch.distributed import FileStore, PrefixStore
from verdict import Figure, conclude

from outsize.collectives import Mesh, join
from outsize.collectives.hierarchical import Hierarchical
from outsize.collectives.small import ALGORITHMS
from outsize.collectives.tables import Chosen, Row, Table

HOSTS, RANKS, SECONDS = 4, 2, 1e-3
SIZES = (1 << 10, 16 << 10, 128 << 10, 512 << 10, 2 << 20)
PAPER = 128 << 10  # bytes from which its figures are, up to the largest of these sizes
LINKS = "links of a millisecond"
ROUNDS = 7


def only(name: str, size: int) -> Table:
    """A table that always says one algorithm."""
    return Table(size, (Row(name, 1, 1.0), Row(name, SIZES[-1], 1.0)))


def worker(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    size = HOSTS * RANKS
    world = join(Mesh(data=size), rank, FileStore(path, size), host=f"host {rank // RANKS}")
    group = world.group(range(size))
    assert isinstance(group, Hierarchical)
    assert isinstance(group.outer, Chosen)
    outer, hosts = group.outer.group, [list(range(h, h + RANKS)) for h in range(0, size, RANKS)]
    apart = join(
        world.mesh, rank, PrefixStore("flat", FileStore(path, size)), host=f"host of {rank}"
    )
    alone = apart.group(range(size))
    assert isinstance(alone, Chosen)
    flat = alone.group
    levels = {
        {"ring": "two levels", "doubling": "NVRAR", "star": "star"}[name]: Hierarchical(
            rank, hosts, group.inner, Chosen(outer, only(name, HOSTS)), lambda: flat
        )
        for name in ALGORITHMS
    }
    table = group.outer.table
    contenders = {"flat ring": flat, **levels, "table": group}
    rows = []
    for count in SIZES:
        least = dict.fromkeys(contenders, float("inf"))
        x = torch.full((count // 4,), float(rank))
        for _ in range(ROUNDS):
            for name, contender in contenders.items():
                x.fill_(rank)
                group.barrier()
                begin = time.perf_counter()
                contender.all_reduce(x)
                least[name] = min(least[name], time.perf_counter() - begin)
                assert x.eq(size * (size - 1) / 2).all()
        slowest = group.all_reduce(torch.tensor(list(least.values())), "max")
        rows.append(dict(zip(least, slowest.tolist(), strict=True)))
    if rank == 0:
        print(json.dumps({"rows": rows, "best": [table.best(c // RANKS) for c in SIZES]}))
    group.barrier()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Hosts(HOSTS, SECONDS) as hosts:
        ranks = [
            subprocess.Popen(
                hosts.inside(
                    rank // RANKS,
                    ["env", "GLOO_SOCKET_IFNAME=tun0", "OMP_NUM_THREADS=1", sys.executable,
                     __file__, str(rank), f"{folder}/store"],
                ),
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(HOSTS * RANKS)
        ]  # fmt: skip
        outputs = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "a worker failed"
    found = json.loads(outputs[0].splitlines()[-1])
    for count, row, best in zip(SIZES, found["rows"], found["best"], strict=True):
        figures = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in row.items())
        print(f"{count >> 10:5d} KiB: {figures} ms; table: {best}")
    few = [r for c, r in zip(SIZES, found["rows"], strict=True) if c >= PAPER]
    ratios = {
        against: [row[against] / row["table"] for row in few]
        for against in ("flat ring", "two levels", "star", "NVRAR")
    }
    losses = [row["table"] / min(row[n] for n in row if n != "table") for row in found["rows"]]
    conclude(
        "NVRAR (Singhania et al., 2025); star of TPI-LLM (Li et al., 2024)",
        "1.9 to 3.6 times below NCCL's latency from 128 KB to 2 MB",
        "from 128 KiB to 2 MiB the product's choice is "
        + "; ".join(
            f"{min(r):.1f} to {max(r):.1f} times below {name}" for name, r in ratios.items()
        )
        + f"; the table's choice is at most {max(*losses, 1.0) - 1:.0%} above the best",
        f"emulated: {HOSTS} namespaces of {RANKS} ranks, TUN links of {SECONDS * 1e3:.0f} ms",
        Figure(
            "latency of a flat ring over ours, least of 128 KiB to 2 MiB",
            min(ratios["flat ring"]),
            1.9,
            how="emulated links",
            timed=True,
            other=LINKS,
        ),
        Figure(
            "latency of a flat ring over ours, the most",
            max(ratios["flat ring"]),
            3.6,
            how="emulated links",
            timed=True,
            other=LINKS,
        ),
        Figure(
            "latency of a ring between hosts over ours, least",
            min(ratios["two levels"]),
            1.0,
            nothing=0.0,
            how="emulated links",
            timed=True,
            other=LINKS,
        ),
    )


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
