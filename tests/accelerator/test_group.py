"""Messages between devices: each operation gives what plain arithmetic does, in every order of the
streams; who does not wait, or says another thing than the others, is found out."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import strict
import torch
from torch.distributed import FileStore

from outsize.collectives.c10d import C10d, over_device

Deed = Callable[[C10d, torch.device], Any]
ORDERS = strict.ORDERS[::3]


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
    group.reduce_scatter(mine * 3, spans, part)
    whole = torch.zeros(4 * size, dtype=torch.float64, device=device)
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
    for order in ORDERS:
        for rank, out in enumerate(_met(size, everything, order, tmp_path)):
            assert out["sum"] == [2 * (size * i + 3) for i in range(12)], (order, rank)
            assert out["most"] == [i + size - 1 for i in range(12)]
            assert out["scattered and gathered"] == [3 * (size * i + 3) + 1 for i in range(12)]
            uneven = [(0, 1), (1, 3), (3, 5)][rank]
            assert out["uneven"] == [size * i + 3 for i in range(*uneven)]
            assert out["to all"] == [x * (rank + 1) for r in range(size) for x in (r, r + 1)]
            assert out["told"] == [size - 1] * 3
            assert out["of the host"] == [size] * 2


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
    seen = [_met(2, fault, order, tmp_path)[0] for order in strict.ORDERS[:3]]
    assert any(x != [2.0] * 4 for x in seen)


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
    for said in _met(2, crossed, strict.ORDERS[0], tmp_path):
        assert "rank 0 is at allreduce 4 torch.float32, rank 1 is at allreduce 8" in said


def of_the_host(group: C10d, device: torch.device) -> str:
    transport: Any = group._transport
    try:
        transport.allreduce(torch.ones(3), None)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_tensor_of_the_host_is_refused(tmp_path):
    for said in _met(2, of_the_host, strict.ORDERS[0], tmp_path):
        assert "on cpu; expected one on strict:0" in said


def _sum(x: torch.Tensor) -> Any:
    from outsize.collectives.collective import AllReduce

    return AllReduce(x)


def _met(size: int, deed: Deed, order: Sequence[Any], folder: Path) -> list[Any]:
    """What a deed gives on each of some workers, which are processes forked from this one."""
    forked = multiprocessing.get_context("fork")
    store = folder / f"store{len(list(folder.iterdir()))}"
    store.touch()
    results = forked.SimpleQueue()
    workers = [
        forked.Process(target=_work, args=(r, size, deed, order, store, results))
        for r in range(size)
    ]
    for worker in workers:
        worker.start()
    found = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    assert all(not isinstance(x, Exception) for x in found.values()), found
    return [found[r] for r in range(size)]


def _work(rank: int, size: int, deed: Deed, order: Any, path: Path, results: Any) -> None:
    try:
        strict.start(*order)
        store = FileStore(str(path), size)
        group = over_device(store, rank, range(size), 60.0, "strict")
        results.put((rank, deed(group, torch.device("strict", 0))))
        group.close()
    except BaseException:
        results.put((rank, RuntimeError(traceback.format_exc())))
