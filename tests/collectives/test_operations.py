"""Every operation of every transport, against plain sums in float64 and against the formulas.

Four processes: over shared memory, over gloo (as if each were a host of its own), and two by two.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache, reduce
from pathlib import Path

import collective_tasks as tasks
import numpy as np
import pytest
import torch
from collective_tasks import numpy, values
from crew import WorkerGroup

from outsize.collectives import Mesh
from outsize.collectives.world import steady
from outsize.schedule.program import Talk
from outsize.simulate import network

SIZE = 4
HOSTS = {"Shared": (), "C10d": ("a", "b", "c", "d"), "Hierarchical": ("a", "a", "b", "b")}
UNEVEN = ((0, 5), (5, 5), (5, 150_000), (150_000, 150_007))
GAPS = ((1000, 1003), (4, 900), (2000, 2001), (904, 905))  # not in order, not everything
KINDS = pytest.mark.parametrize("kind", HOSTS)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    crew = WorkerGroup.of(Mesh(SIZE), str(tmp_path_factory.mktemp("crew") / "store"))
    yield crew
    crew.end()


@cache
def summed(numel: int, dtype: torch.dtype) -> np.ndarray:
    """In float64, or int64: exact but for the last bits."""
    return sum(numpy(values(r, numel, dtype)) for r in range(SIZE))


@cache
def in_order(numel: int, dtype: torch.dtype) -> np.ndarray:
    """Rank after rank, narrow dtypes in float32 and rounded once: bit for bit."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    parts = (values(r, numel, dtype).to(wide) for r in range(SIZE))
    return numpy(reduce(torch.add, parts).to(dtype))


@cache
def magnitude(numel: int, dtype: torch.dtype) -> np.ndarray:
    """What roundings of a sum are relative to."""
    return sum(np.abs(numpy(values(r, numel, dtype))) for r in range(SIZE))


# A few roundings of float64 and float32; one of the narrow dtypes.
CLOSE = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4,
         torch.int64: 0.0, torch.int32: 0.0}  # fmt: skip


@KINDS
def test_sums_that_do_not_depend_on_the_place(crew: WorkerGroup, kind: str) -> None:
    """What serving says of a mesh: alike in any company."""
    first, *others = crew.run(tasks.at_places, hosts=HOSTS[kind])[0]
    assert all(one == first for one in others) == steady(HOSTS[kind] or ("a",) * SIZE)


@KINDS
def test_each_world_uses_the_transport_that_fits(crew: WorkerGroup, kind: str) -> None:
    assert crew.run(tasks.kind, hosts=HOSTS[kind]) == [kind] * SIZE


@KINDS
@pytest.mark.parametrize(
    ("dtype", "numel"),
    [
        *((dtype, numel) for dtype in (torch.float32, torch.bfloat16) for numel in (1, 250_003)),
        *((torch.float64, n) for n in (3, 20_000)), *((torch.float16, n) for n in (1, 20_000)),
        *((torch.int64, n) for n in (3, 250_003)), (torch.int32, 20_000),
    ],
    ids=str,
)  # fmt: skip
def test_all_reduce_sums(crew: WorkerGroup, kind: str, dtype: torch.dtype, numel: int) -> None:
    found = crew.run(tasks.all_reduce, numel, dtype, "sum", hosts=HOSTS[kind])
    error = CLOSE[dtype] * magnitude(numel, dtype)
    for result, _ in found:
        assert np.array_equal(result, found[0][0])  # the same bits everywhere
        assert (np.abs(result - summed(numel, dtype)) <= error).all()
    if kind == "Shared" or (kind == "C10d" and dtype == torch.bfloat16):
        assert np.array_equal(found[0][0], in_order(numel, dtype))


@KINDS
def test_all_reduce_of_the_largest_keeps_a_nan(crew: WorkerGroup, kind: str) -> None:
    for numel, dtype in ((1, torch.float32), (70_000, torch.bfloat16), (5, torch.int64)):
        found = crew.run(tasks.all_reduce, numel, dtype, "max", hosts=HOSTS[kind])
        want = np.max([numpy(values(r, numel, dtype)) for r in range(SIZE)], axis=0)
        assert all(np.array_equal(result, want) for result, _ in found)
    found = crew.run(tasks.largest_with_nan, hosts=HOSTS[kind])
    assert found == [[True, False, True]] * SIZE


def test_all_reduce_of_a_strided_tensor_leaves_the_rest(crew: WorkerGroup) -> None:
    mine = [numpy(values(r, 60, torch.float32)).reshape(6, 10) for r in range(SIZE)]
    want = in_order(60, torch.float32).reshape(6, 10)
    for rank, whole in enumerate(crew.run(tasks.all_reduce_strided)):
        assert np.array_equal(whole[:, ::3], want[:, ::3])
        assert np.array_equal(whole[:, 1::3], mine[rank][:, 1::3])


@KINDS
@pytest.mark.parametrize(
    ("dtype", "spans"),
    [
        (torch.float64, UNEVEN), (torch.bfloat16, UNEVEN), (torch.float32, GAPS),
        (torch.bfloat16, GAPS), (torch.float32, ((0, 0),) * SIZE),
    ],
    ids=["uneven", "uneven, narrow", "gaps", "gaps, narrow", "empty"],
)  # fmt: skip
def test_reduce_scatter(
    crew: WorkerGroup, kind: str, dtype: torch.dtype, spans: tuple[tuple[int, int], ...]
) -> None:
    numel = 150_010
    for alias in (False, True):
        found = crew.run(tasks.reduce_scatter, numel, dtype, spans, alias, hosts=HOSTS[kind])
        want, exact = summed(numel, dtype), in_order(numel, dtype)
        error = CLOSE[dtype] * magnitude(numel, dtype)
        for (first, last), (result, received) in zip(spans, found, strict=True):
            if kind == "Hierarchical":
                assert (np.abs(result - want[first:last]) <= error[first:last]).all()
            else:
                assert np.array_equal(result, exact[first:last])
                assert received == (SIZE - 1) * (last - first) * dtype.itemsize


@KINDS
@pytest.mark.parametrize("spans", [UNEVEN, GAPS], ids=["uneven", "gaps"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_all_gather(
    crew: WorkerGroup, kind: str, dtype: torch.dtype, spans: tuple[tuple[int, int], ...]
) -> None:
    numel, want = 150_010, np.zeros(150_010)
    for rank, (first, last) in enumerate(spans):
        want[first:last] = numpy(values(rank, last - first, dtype))
    for alias in (False, True):
        found = crew.run(tasks.all_gather, numel, dtype, spans, alias, hosts=HOSTS[kind])
        assert all(np.array_equal(result, want) for result, _ in found)
        total, lengths = sum(b - a for a, b in spans), [b - a for a, b in spans]
        if kind == "Hierarchical":  # within a host everything comes from the neighbour
            assert sum(r for _, r in found) == sum(total - n for n in lengths) * dtype.itemsize
        else:
            assert [r for _, r in found] == [(total - n) * dtype.itemsize for n in lengths]


@KINDS
def test_all_to_all_of_uneven_parts(crew: WorkerGroup, kind: str) -> None:
    counts = [[5, 0, 1, 700_000], [2, 3, 0, 0], [0, 0, 0, 0], [1, 400_001, 7, 9]]
    for dtype in (torch.float32, torch.bfloat16):
        found = crew.run(tasks.all_to_all, counts, dtype, hosts=HOSTS[kind])
        for me, (results, received) in enumerate(found):
            for origin, result in enumerate(results):
                want = numpy(values(10 * origin + me, counts[origin][me], dtype))
                assert np.array_equal(result, want)
            others = sum(counts[r][me] for r in range(SIZE) if r != me)
            assert received == others * dtype.itemsize


@KINDS
def test_broadcast_from_everyone(crew: WorkerGroup, kind: str) -> None:
    for source, numel in ((0, 3), (2, 900_000), (3, 0)):
        want = numpy(values(source, numel, torch.float32))
        found = crew.run(tasks.broadcast, numel, torch.float32, source, hosts=HOSTS[kind])
        assert all(np.array_equal(result, want) for result, _ in found)
        assert sum(received for _, received in found) == (SIZE - 1) * numel * 4


@KINDS
@pytest.mark.parametrize(("own", "elsewhere"), [(False, False), (True, False), (False, True)])
def test_operations_are_begun_before_one_is_waited_for(
    crew: WorkerGroup, kind: str, own: bool, elsewhere: bool
) -> None:
    """own: as NCCL would, by gloo's operations of the same names."""
    if kind != "C10d" and (own or elsewhere):
        return
    numel = 30_000
    whole = [numpy(values(r, SIZE * numel, torch.float64)) for r in range(SIZE)]
    for rank, found in enumerate(crew.run(tasks.several, numel, own, elsewhere, hosts=HOSTS[kind])):
        total, part, out, said = found
        np.testing.assert_allclose(total, sum(x[:numel] for x in whole), rtol=1e-12, atol=1e-12)
        here = slice(rank * numel, (rank + 1) * numel)
        np.testing.assert_allclose(part, sum(x[here] for x in whole), rtol=1e-12, atol=1e-12)
        assert np.array_equal(out, np.concatenate([x[:numel] for x in whole]))
        assert np.array_equal(said, numpy(values(1, numel, torch.float32)))


@KINDS
def test_bytes_of_an_all_reduce_are_the_formula(crew: WorkerGroup, kind: str) -> None:
    """Of sums that no table has another algorithm for."""
    for numel, dtype in ((1 << 20, torch.float32), (1 << 19, torch.int64)):
        found = crew.run(tasks.all_reduce, numel, dtype, "sum", hosts=HOSTS[kind])
        formula = Fraction(2 * (SIZE - 1), SIZE) * numel * dtype.itemsize
        assert [received for _, received in found] == [formula] * SIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_of_a_sum_of_levels_are_those_predicted(crew: WorkerGroup, dtype: torch.dtype):
    """Narrow dtypes are summed, and so said, in a wider one."""
    found = crew.run(tasks.all_reduce, 4000, dtype, "sum", hosts=HOSTS["Hierarchical"])
    whole, wide = 4000 * dtype.itemsize, 4 / dtype.itemsize
    talk = Talk(tuple(range(SIZE)), "network", "all_reduce", whole, wide=wide)
    assert {received for _, received in found} == {network.near(talk, 2) + network.far(talk, 2)}


@KINDS
def test_a_barrier_waits_for_the_last(crew: WorkerGroup, kind: str) -> None:
    left = crew.run(tasks.barrier, hosts=HOSTS[kind])
    assert min(left) >= left[1]


@KINDS
def test_two_threads_talk_in_groups_of_their_own(crew: WorkerGroup, kind: str) -> None:
    found = crew.run(tasks.pairs, hosts=HOSTS[kind])
    assert found == [((1.0, 2.0), 6.0), ((1.0, 4.0), 6.0), ((5.0, 2.0), 6.0), ((5.0, 4.0), 6.0)]


@KINDS
def test_a_world_counts_bytes_once_and_those_of_other_hosts(crew: WorkerGroup, kind: str) -> None:
    """Of 4 parts a worker has 3; from other hosts all of them, or one of each place there."""
    for counted, far in crew.run(tasks.levels, 4000, hosts=HOSTS[kind]):
        assert counted == {"all_gather": 3 * 4000}
        assert far == {"Shared": 0, "C10d": 3 * 4000, "Hierarchical": 4000}[kind]


def test_no_file_of_shared_memory_is_left(crew: WorkerGroup) -> None:
    crew.run(tasks.kind)
    pids = {str(p.pid) for p in crew.processes}
    assert not [f for f in Path("/dev/shm").glob("outsize-*") if f.name.split("-")[1] in pids]
