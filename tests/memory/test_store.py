"""Stores in memory: what comes back is what went in, wherever the memory comes from."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from resident import resident
from torch import Tensor

from outsize import accelerator
from outsize.errors import OutsizeError
from outsize.memory.store import ALIGN, BLOCK, MemoryStore, Place, pool

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SHM = Path("/dev/shm")


def noise(nbytes: int, seed: int = 0) -> Tensor:
    made = torch.empty(nbytes, dtype=torch.uint8)
    return made.random_(generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["ram", "path"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryStore:
    return MemoryStore("near", 8 * BLOCK, path=tmp_path if request.param == "path" else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(store: MemoryStore, dtype: torch.dtype) -> None:
    data = noise(240).view(dtype) if dtype != torch.bool else noise(240) > 99
    data = data.reshape(3, -1)
    other, place = store.reserve(5), store.reserve(data.nbytes)
    store.write(place, data)
    store.write(other, torch.zeros(5, dtype=torch.uint8))
    out = torch.empty_like(data)
    store.read(place, out)
    assert torch.equal(out.view(torch.uint8), data.view(torch.uint8))
    assert (store.bytes_read, store.bytes_written) == (data.nbytes, data.nbytes + 5)


@pytest.mark.parametrize("nbytes", [0, 1, ALIGN - 1, ALIGN, BLOCK, 2 * BLOCK + 12345])
def test_parts_of_a_place(store: MemoryStore, nbytes: int) -> None:
    store.reserve(1)
    place, data = store.reserve(nbytes), noise(nbytes)
    store.write(place, data)
    for at in range(0, nbytes, BLOCK):
        out = torch.empty(min(BLOCK, nbytes - at), dtype=torch.uint8)
        store.read(place, out, at)
        assert torch.equal(out, data[at : at + BLOCK])
    if nbytes > BLOCK:
        store.write(place, data[:BLOCK], BLOCK)
        out = torch.empty_like(data)
        store.read(place, out)
        assert torch.equal(out, torch.cat([data[:BLOCK], data[:BLOCK], data[2 * BLOCK :]]))


def test_spans_that_a_disk_would_refuse_are_refused_here(store: MemoryStore) -> None:
    place = store.reserve(3 * BLOCK)
    for data, at in (
        (noise(BLOCK), 512),
        (noise(100), 0),
        (noise(BLOCK), 3 * BLOCK),
        (noise(4 * BLOCK)[::2], 0),
    ):
        with pytest.raises(AssertionError):
            store.write(place, data, at)
        with pytest.raises(AssertionError):
            store.read(place, data, at)


def test_places_lie_one_after_another_and_the_missing_bytes_are_named() -> None:
    store = MemoryStore("host", 10 * ALIGN - 5)
    assert store.reserve(1) == Place(0, 1)
    assert store.reserve(ALIGN + 1) == Place(ALIGN, ALIGN + 1)
    with pytest.raises(OutsizeError) as error:
        store.reserve(9 * ALIGN)
    assert str(error.value) == (
        "tier 'host': 36,864 bytes wanted, 28,672 of 40,960 free, 8,192 missing;"
        " declare a larger tier or another one"
    )
    assert store.reserve(7 * ALIGN - 5) == Place(3 * ALIGN, 7 * ALIGN - 5)


def test_a_view_is_the_place_itself(store: MemoryStore) -> None:
    store.reserve(1)
    place, data = store.reserve(BLOCK + 3), noise(BLOCK + 3)
    store.write(place, data)
    view = store.view(place)
    assert torch.equal(view, data)
    view.fill_(9)
    out = torch.empty_like(data)
    store.read(place, out)
    assert bool((out == 9).all())


def test_a_closed_store_says_so(store: MemoryStore) -> None:
    place = store.reserve(8)
    store.close()
    store.close()
    with pytest.raises(OutsizeError, match="tier 'near' is closed"):
        store.read(place, noise(8))


def test_threads_do_not_meet(store: MemoryStore) -> None:
    """Every thread reads back its own bytes, and every byte is counted."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        place = store.reserve(100_000)
        for turn in range(20):
            data = noise(100_000, 100 * seed + turn)
            out = torch.empty_like(data)
            store.write(place, data)
            store.read(place, out)
            if not torch.equal(out, data):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.bytes_read == store.bytes_written == 6 * 20 * 100_000


@pytest.mark.parametrize("nbytes", [0, 1, ALIGN, 3 * BLOCK + 1])
def test_pools_are_exact_aligned_and_zero(nbytes: int) -> None:
    made = pool(nbytes)
    assert made.shape == (nbytes,) and made.dtype == torch.uint8
    assert made.data_ptr() % ALIGN == 0
    assert int(made.sum()) == 0
    made.fill_(7)


def test_pools_are_there_at_once_and_go_with_the_last_view() -> None:
    size = 64 << 20
    before = resident()
    made = pool(size)
    assert resident() - before > 0.95 * size
    view = made[5:6]
    del made
    assert resident() - before > 0.95 * size
    del view
    assert resident() - before < 0.05 * size


def test_a_store_takes_pages_when_they_are_reserved() -> None:
    size = 64 << 20
    before = resident()
    store = MemoryStore("host", 4 * size)
    assert resident() - before < 0.1 * size
    place = store.reserve(size)
    held = resident()
    assert held - before > 0.95 * size
    piece = noise(BLOCK)
    for at in range(0, size, BLOCK):
        store.write(place, piece, at)
    assert resident() - held < 0.05 * size
    store.close()
    assert resident() - before < 0.1 * size


def test_more_than_there_can_be() -> None:
    with pytest.raises(OutsizeError, match=r"cannot allocate .* plan with less"):
        pool(1 << 60)


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    class Poor(mmap.mmap):
        def madvise(self, option: int, *span: int) -> None:
            if option == 23:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", Poor)
    with pytest.raises(OutsizeError) as error:
        pool(100)
    assert str(error.value) == (
        "a buffer: 100 bytes of memory are not there (Cannot allocate memory); plan with less"
    )


def test_kernels_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    class Older(mmap.mmap):
        def madvise(self, option: int, *span: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Older)
    size = 64 << 20
    before = resident()
    made = pool(size)
    assert resident() - before > 0.95 * made.nbytes


@pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
def test_memory_with_a_path_leaves_no_name() -> None:
    before = set(os.listdir(SHM))
    for path in (SHM, SHM / f"outsize-test-{os.getpid()}"):
        store = MemoryStore("cxl", BLOCK, path=path)
        place, data, out = store.reserve(BLOCK), noise(BLOCK), noise(BLOCK, 1)
        store.write(place, data)
        store.read(place, out)
        assert torch.equal(out, data)
        assert not [name for name in set(os.listdir(SHM)) - before if "outsize" in name]
        store.close()


def test_paths_that_cannot_be_memory(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep this")
    for path, reason in ((tmp_path / "mine", "File exists"), (tmp_path / "a" / "b", "No such")):
        with pytest.raises(OutsizeError, match=f"tier 'cxl': {path} cannot be .* \\({reason}"):
            MemoryStore("cxl", BLOCK, path=path)
    assert (tmp_path / "mine").read_text() == "keep this"


class Runtime:
    """Stands in for CUDA's: writes down what is registered; reads the bytes when they go."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.held, self.last = code, {}, []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.held[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.last.append(ctypes.string_at(address, self.held.pop(address)))
        return 0


def test_pinned_memory_is_registered_for_as_long_as_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(accelerator, "there", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    made = pool(5000, pinned=True)
    assert runtime.held == {made.data_ptr(): 5000}
    view = made.fill_(3)[17:]
    del made
    assert runtime.held
    del view
    assert runtime.last == [b"\3" * 5000]  # still mapped when it is unregistered
    store = MemoryStore("host", BLOCK, pinned=True)
    assert list(runtime.held.values()) == [BLOCK]
    store.close()
    assert not runtime.held
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(OutsizeError, match=r"5,000 bytes cannot be page-locked \(CUDA error 2\)"):
        pool(5000, pinned=True)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@cuda
@pytest.mark.cuda
def test_pinned_memory_and_tensors_of_a_gpu(tmp_path: Path) -> None:
    assert pool(3 * BLOCK, pinned=True).is_pinned()
    for path in (None, SHM):
        store = MemoryStore("host", 4 * BLOCK, pinned=True, path=path)
        place, data = store.reserve(2 * BLOCK + 5), noise(2 * BLOCK + 5).cuda()
        store.write(place, data)
        out = torch.zeros_like(data)
        store.read(place, out)
        assert torch.equal(out, data)
        store.close()
