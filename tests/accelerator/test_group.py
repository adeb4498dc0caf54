"""Messages between devices: each operation gives what plain arithmetic does, in every order of the
streams; who does not wait, or says another thing than the others, is found out."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import strict
import torch
import torch.distributed as dist
from cases import some
from torch.distributed import FileStore, PrefixStore

from outsize.collectives.c10d import C10d, over_device
from outsize.collectives.collective import AllReduce, ReduceScatter
from outsize.collectives.pretend import Pretend

Deed = Callable[[C10d, torch.device], Any]
ORDERS = some(0, least=3)


def everything(group: C10d, device: torch.device) -> dict[str, list[float]]:
    """Every operation; the sums follow from each other, so that a wait too few spoils the next."""
    rank, size, out = group.rank, group.size, dict[str, list[float]]()
    mine = torch.arange(4.0 * size, dtype=torch.float64).to(device) + rank
    total = mine.clone()
    group.all_reduce(total)
    out["sum"] = (total * 2).tolist()
    out["most"] = group.all_reduce(mine.clone(), "max").tolist()
    spans = [(4 * r, 4 * r + 4) for r in range(size)]
    part = torch.empty(4, dtype=torch.float64, device=device)
    whole = torch.zeros(4 * size, dtype=torch.float64, device=device)
    with patch.object(C10d, "post", None):  # equal parts: operations of the group, not messages
        group.reduce_scatter(mine * 3, spans, part)
        group.all_gather(part + 1, spans, whole)
    out["scattered and gathered"] = whole.tolist()
    uneven = [(0, 1), *((1 + 2 * r, 3 + 2 * r) for r in range(size - 1))]
    some = torch.empty(uneven[rank][1] - uneven[rank][0], dtype=torch.float64, device=device)
    group.reduce_scatter(mine.clone(), uneven, some)
    out["uneven"] = some.tolist()
    given = [(mine[:2] * (peer + 1)).contiguous() for peer in range(size)]
    had = [torch.empty(2, dtype=torch.float64, device=device) for _ in range(size)]
    group.all_to_all(given, had)
    out["to all"] = torch.cat(had).tolist()
    said = torch.full((3,), float(rank), device=device, dtype=torch.bfloat16)
    out["told"] = group.broadcast(said, size - 1).tolist()
    out["of the host"] = group.all_reduce(torch.ones(2)).tolist()
    group.barrier()
    return out


def test_operations_give_what_arithmetic_does(tmp_path):
    size = 3
    for order, outs in zip(ORDERS, _met(size, everything, ORDERS, tmp_path), strict=True):
        for rank, out in enumerate(outs):
            assert out["sum"] == [2 * (size * i + 3) for i in range(12)], (order, rank)
            assert out["most"] == [i + size - 1 for i in range(12)]
            assert out["scattered and gathered"] == [3 * (size * i + 3) + 1 for i in range(12)]
            uneven = [(0, 1), (1, 3), (3, 5)][rank]
            assert out["uneven"] == [size * i + 3 for i in range(*uneven)]
            assert out["to all"] == [x * (rank + 1) for r in range(size) for x in (r, r + 1)]
            assert out["told"] == [size - 1] * 3
            assert out["of the host"] == [size] * 2


def taken(group: C10d, device: torch.device) -> list[list[int]]:
    """Bytes that each sum whose parts workers add takes, last one that the transport forms, and
    what a rehearsal says of it."""
    unequal, apart = [(0, 3000), (3000, 4000)], [(0, 1000), (2000, 3000)]
    own = slice(*unequal[group.rank])
    narrow, wide = (torch.ones(4000, device=device, dtype=x) for x in (torch.bfloat16, torch.float))
    calls = (
        AllReduce(narrow),
        AllReduce(wide, "max"),
        ReduceScatter(narrow, unequal, narrow[own]),
        ReduceScatter(wide, apart, wide[slice(*apart[group.rank])]),
        ReduceScatter(wide, unequal, wide[own]),
    )
    found = []
    for each in (group, Pretend(group.size, group.rank)):
        for call in calls:
            torch.accelerator.synchronize()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            each.start(call).wait()
            found.append(torch.accelerator.max_memory_allocated() - before)
    return [found[: len(calls)], found[len(calls) :]]


def test_a_rehearsal_takes_the_room_that_a_sum_does(tmp_path):
    (both,) = _met(2, taken, strict.ORDERS[:1], tmp_path)
    for real, rehearsed in both:
        assert real == rehearsed
        assert min(real[:-1]) >= 2 * 4000 and not real[-1]


def no_wait(group: C10d, device: torch.device) -> list[float]:
    """Read without having waited."""
    x = torch.ones(4, device=device)
    handle = group.start(_sum(x))
    early = x * 1
    handle.wait()
    return early.tolist()


def written_again(group: C10d, device: torch.device) -> list[float]:
    """Written before it was sent."""
    x = torch.ones(4, device=device)
    handle = group.start(_sum(x))
    x.fill_(7)
    handle.wait()
    return x.tolist()


@pytest.mark.parametrize("fault", [no_wait, written_again])
def test_who_does_not_wait_reads_something_else(fault, tmp_path):
    seen = _met(2, fault, strict.ORDERS[:3], tmp_path)
    assert any(of_first != [2.0] * 4 for of_first, _ in seen)


def crossed(group: C10d, device: torch.device) -> str:
    """Two operations, on the last worker the other way round."""
    sizes = (4, 8) if group.rank + 1 < group.size else (8, 4)
    try:
        for size in sizes:
            group.all_reduce(torch.ones(size, device=device))
        torch.accelerator.synchronize()
        group.all_reduce(torch.ones(1, device=device))
    except (RuntimeError, Exception) as error:
        return str(error)
    return ""


def test_another_order_is_named(tmp_path):
    (both,) = _met(2, crossed, strict.ORDERS[:1], tmp_path)
    for said in both:
        assert "rank 0 is at allreduce 4 torch.float32, rank 1 is at allreduce 8" in said


def of_the_host(group: C10d, device: torch.device) -> str:
    """Numbers of the host are not brought to the device before they are summed."""
    group.device = torch.device("cpu")
    try:
        group.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_tensor_of_the_host_is_refused(tmp_path):
    (both,) = _met(2, of_the_host, strict.ORDERS[:1], tmp_path)
    for said in both:
        assert "on cpu; expected one on strict:0" in said


def between(group: C10d, device: torch.device) -> str:
    """An operation in each of two groups, on the last worker the other way round."""
    transport: Any = group._transport
    store = PrefixStore("other", transport.store)
    other = over_device(store, group.rank, range(2), 60.0, "strict")
    x, y = torch.ones(4, device=device), torch.ones(8, device=device)
    try:
        for one, what in ((group, x), (other, y)) if group.rank == 0 else ((other, y), (group, x)):
            one.all_reduce(what)
        torch.accelerator.synchronize()
        group.all_reduce(x)
    except Exception as error:
        return str(error)
    finally:
        other.abort("the test is over")
    return ""


def test_operations_of_two_groups_that_cross_are_named(tmp_path):
    for both in _met(2, between, strict.ORDERS[:2], tmp_path):
        first, last = "allreduce 4 torch.float32", "allreduce 8 torch.float32"
        for rank, said in enumerate(both):
            mine, other = (first, last) if rank == 0 else (last, first)
            assert f"two groups cross: rank {rank} is at {mine} and has {other}" in said
            assert f"rank {1 - rank} is at {other} of that group" in said


def mesh(rank: int, path: str) -> dict[str, list[float]]:
    """What torch.distributed's own calls give over the device's backend, a DTensor's too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("strict", store=FileStore(path, 2), rank=rank, world_size=2)
    device, out = torch.device("strict", 0), dict[str, list[float]]()
    x = torch.arange(4.0, device=device) + rank
    dist.all_reduce(x)
    out["sum"] = x.tolist()
    work = dist.all_gather_into_tensor(
        whole := torch.empty(8, device=device), x[:4] * (rank + 1), async_op=True
    )
    work.wait()
    out["gathered"] = whole.tolist()
    dist.reduce_scatter_tensor(part := torch.empty(2, device=device), x)
    out["scattered"] = part.tolist()
    dist.all_to_all_single(had := torch.empty(4, device=device), x * (rank + 1))
    out["to all"] = had.tolist()
    two = init_device_mesh("strict", (2,))
    mine = torch.arange(3.0, device=device).view(1, 3) + 3 * rank
    weight = DTensor.from_local(mine, two, [Shard(0)])
    out["layout"] = (weight * 2).full_tensor().flatten().tolist()
    out["of rows"] = weight.sum(0).full_tensor().tolist()
    dist.destroy_process_group()
    return out


def test_it_is_a_backend_of_torch_distributed(tmp_path):
    forked = multiprocessing.get_context("fork")
    results = forked.SimpleQueue()
    path = str(tmp_path / "store")
    workers = [forked.Process(target=_in_mesh, args=(r, path, results)) for r in range(2)]
    for worker in workers:
        worker.start()
    for rank, out in dict(results.get() for _ in workers).items():
        assert out == {
            "sum": [1, 3, 5, 7], "gathered": [1, 3, 5, 7, 2, 6, 10, 14],
            "scattered": [[2, 6], [10, 14]][rank], "to all": [[1, 3, 2, 6], [5, 7, 10, 14]][rank],
            "layout": [0, 2, 4, 6, 8, 10], "of rows": [3, 5, 7],
        }  # fmt: skip


def _in_mesh(rank: int, path: str, results: Any) -> None:
    try:
        strict.start("random", seed=rank)
        results.put((rank, mesh(rank, path)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def _sum(x: torch.Tensor) -> Any:
    from outsize.collectives.collective import AllReduce

    return AllReduce(x)


def _met(
    size: int, deed: Deed, orders: Sequence[tuple[str, int, int]], folder: Path
) -> list[list[Any]]:
    """What a deed gives in each of the orders, on each of some workers, which are processes forked
    from this one."""
    forked = multiprocessing.get_context("fork")
    results = forked.SimpleQueue()
    workers = [
        forked.Process(target=_work, args=(r, size, deed, orders, folder, results))
        for r in range(size)
    ]
    for worker in workers:
        worker.start()
    found = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    assert all(not isinstance(x, Exception) for x in found.values()), found
    return [[found[rank][i] for rank in range(size)] for i in range(len(orders))]


def _work(rank: int, size: int, deed: Deed, orders: Any, folder: Path, results: Any) -> None:
    found = []
    try:
        for place, order in enumerate(orders):
            strict.start(*order)
            store = FileStore(str(folder / f"store{place}"), size)
            group = over_device(store, rank, range(size), 60.0, "strict")
            found.append(deed(group, torch.device("strict", 0)))
            group.close()
        results.put((rank, found))
    except BaseException:
        results.put((rank, RuntimeError(traceback.format_exc())))
