"""What the workers of a crew do in tests of collectives. Values come back as NumPy arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import until
from torch import Tensor

from outsize.collectives import Joined, everyone, received
from outsize.collectives.c10d import C10d
from outsize.collectives.collective import AllGather, AllReduce, Broadcast, Call, ReduceScatter
from outsize.collectives.tables import Chosen

Spans = Sequence[tuple[int, int]]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What a worker brings: magnitudes from 1e-3 to 1e3, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point:
        return (x * 10 ** (torch.rand(numel, generator=generator) * 6 - 3)).to(dtype)
    return (x * 1000).to(dtype)


def numpy(x: Tensor) -> np.ndarray:
    """As float64, or int64."""
    return (x.double() if x.is_floating_point() else x.long()).numpy()


def all_reduce(world: Joined, numel: int, dtype: torch.dtype, operation: str) -> Any:
    group, x = everyone(world), values(world.rank, numel, dtype)
    before = group.received["all_reduce"]
    assert group.all_reduce(x, operation) is x
    return numpy(x), group.received["all_reduce"] - before


def at_places(world: Joined) -> list[list[float]]:
    """The sums of seven numbers at places of tensors of several sizes."""
    mine, found = values(world.rank, 7, torch.float32), []
    for numel in (7, 5000, 70_000):
        for at in (0, numel // 3, numel - 7):
            x = values(world.rank + 50, numel, torch.float32)
            x[at : at + len(mine)] = mine[: numel - at]
            found.append(everyone(world).all_reduce(x)[at : at + 7].tolist())
    return [one for one in found if len(one) == 7]


def all_reduce_strided(world: Joined) -> Any:
    whole = values(world.rank, 60, torch.float32).view(6, 10)
    everyone(world).all_reduce(whole[:, ::3])
    return numpy(whole)


def reduce_scatter(world: Joined, numel: int, dtype: torch.dtype, spans: Spans, alias: bool) -> Any:
    group, x = everyone(world), values(world.rank, numel, dtype)
    first, last = spans[world.rank]
    out = x[first:last] if alias else torch.full((last - first,), 7, dtype=dtype)
    before = group.received["reduce_scatter"]
    group.reduce_scatter(x, spans, out)
    return numpy(out), group.received["reduce_scatter"] - before


def all_gather(world: Joined, numel: int, dtype: torch.dtype, spans: Spans, alias: bool) -> Any:
    group, out = everyone(world), torch.zeros(numel, dtype=dtype)
    first, last = spans[world.rank]
    mine = values(world.rank, last - first, dtype)
    if alias:
        out[first:last] = mine
        mine = out[first:last]
    before = group.received["all_gather"]
    group.all_gather(mine, spans, out)
    return numpy(out), group.received["all_gather"] - before


def all_to_all(world: Joined, counts: Sequence[Sequence[int]], dtype: torch.dtype) -> Any:
    """counts[from][to]: elements; what goes from a to b begins with values(10 a + b)."""
    group, me, size = everyone(world), world.rank, world.mesh.size
    given = [values(10 * me + to, counts[me][to], dtype) for to in range(size)]
    out = [torch.zeros(counts[origin][me], dtype=dtype) for origin in range(size)]
    before = group.received["all_to_all"]
    group.all_to_all(given, out)
    return [numpy(x) for x in out], group.received["all_to_all"] - before


def broadcast(world: Joined, numel: int, dtype: torch.dtype, source: int) -> Any:
    group, x = everyone(world), values(world.rank, numel, dtype)
    before = group.received["broadcast"]
    group.broadcast(x, source)
    return numpy(x), group.received["broadcast"] - before


def several(world: Joined, numel: int, own: bool, elsewhere: bool) -> Any:
    """A sum, a scattered sum, a gathering and what rank 1 says, all begun before one is waited for.
    own: by the transport's own operations; elsewhere: as if the tensors were of another device."""
    group, size, me = everyone(world), world.mesh.size, world.rank
    if isinstance(group, C10d):
        group.own, group.device = own, torch.device("cpu:0" if elsewhere else "cpu")
    spans = [(r * numel, (r + 1) * numel) for r in range(size)]
    flat, out = values(me, size * numel, torch.float64), torch.zeros(size * numel).double()
    mine, said = flat[:numel].clone(), values(me, numel, torch.float32)
    total, part = mine.clone(), torch.zeros(numel).double()
    calls: list[Call] = [
        AllReduce(total), ReduceScatter(flat, spans, part), AllGather(mine, spans, out),
        Broadcast(said, 1),
    ]  # fmt: skip
    for handle in [group.start(call) for call in calls]:
        handle.wait()
    if isinstance(group, C10d):
        group.own, group.device = False, torch.device("cpu")
    return [numpy(x) for x in (total, part, out, said)]


def kind(world: Joined) -> str:
    group = everyone(world)
    return type(group.group if isinstance(group, Chosen) else group).__name__


def pairs(world: Joined) -> Any:
    """Sums in groups of two of four, of both uses, from two threads at once; then of everybody."""
    from concurrent.futures import ThreadPoolExecutor

    me = world.rank
    neighbours, across = (me - me % 2, me - me % 2 + 1), (me % 2, me % 2 + 2)

    def total(ranks: tuple[int, int], use: Any) -> float:
        group = world.group(ranks, use)
        return sum(float(group.all_reduce(torch.tensor([float(me)]))) for _ in range(50)) / 50

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(total, neighbours, "compute")
        second = pool.submit(total, across, "network")
        sums = first.result(), second.result()
    return sums, float(everyone(world).all_reduce(torch.tensor([float(me)])))


def barrier(world: Joined) -> float:
    """When this worker left the barrier, into which worker 1 came late."""
    group = everyone(world)
    group.barrier()
    if world.rank == 1:
        time.sleep(0.2)
        came = time.monotonic()  # of all processes of a machine
        group.barrier()
        return came
    group.barrier()
    return time.monotonic()


def wait_for(world: Joined, late: int, seconds: float) -> None:
    """Totals sums but for the rank `late`, which sleeps first."""
    if world.rank == late:
        time.sleep(seconds)
    everyone(world).all_reduce(torch.ones(4))


def abort(world: Joined, who: int) -> None:
    """Worker `who` aborts the run while the others wait."""
    group = everyone(world)
    if world.rank == who:
        time.sleep(0.2)
        world.abort("the loss is not a number")
        return
    group.barrier()


def interrupted(world: Joined, path: str) -> bool:
    """Worker 0 gets a signal while it waits for worker 1, who comes when that has been handled: its
    handler makes the file. Gives whether it is there."""
    import signal
    import threading

    group, handled = everyone(world), Path(path)
    if world.rank == 0:
        signal.signal(signal.SIGUSR1, lambda *_: handled.touch())
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    found = world.rank != 1 or until(handled.exists)
    group.barrier()
    return found


def largest_with_nan(world: Joined) -> list[bool]:
    """Two workers have a NaN each: whether the largest is one, by element."""
    x = torch.tensor([1.0, 2.0, 3.0])
    if world.rank in (0, 3):
        x[2 if world.rank else 0] = torch.nan
    return everyone(world).all_reduce(x, "max").isnan().tolist()


def states_of_a_wait(world: Joined) -> Any:
    """What worker 0 reads of a group in which the others are an operation ahead of it."""
    group, x = everyone(world), torch.zeros(1)
    group.barrier()
    if world.rank:
        group.broadcast(x)
        return None
    waiting = ("broadcast", 0)
    until(lambda: all((s.operation, s.waits_for) == waiting for s in group.states()[1:]))
    found = group.states()
    group.broadcast(x)
    return found


def levels(world: Joined, numel: int) -> tuple[dict[str, int], float]:
    """Bytes of one all-gather of everybody's part, in all and from other hosts."""
    group, part = everyone(world), numel // world.mesh.size
    before, far = received(world, "compute"), world.across()
    spans = [(i * part, i * part + part) for i in range(world.mesh.size)]
    group.all_gather(torch.ones(part), spans, torch.empty(numel))
    now = received(world, "compute")
    return {n: now[n] - before.get(n, 0) for n in now if now[n] > before.get(n, 0)}, (
        world.across() - far
    )
