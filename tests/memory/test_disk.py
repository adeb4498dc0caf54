"""The tier on disk: round trips, faults made on purpose, and nothing left behind."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resident import resident
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION, THREADS
from outsize.memory.disk import DiskStore, Part, cut, staging_bytes
from outsize.memory.spill import STRIPE, SpillFile, Stripes
from outsize.memory.store import ALIGN, BLOCK, pool

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
ODD_SIZES = (1, 511, ALIGN, ALIGN + 1, BLOCK - 1, BLOCK, OPERATION, 2 * OPERATION + BLOCK + 777)


def noise(nbytes: int, seed: int = 0, aligned: bool = True) -> Tensor:
    made = pool(nbytes + 1)[:nbytes] if aligned else pool(nbytes + 1)[1:]
    words = torch.empty(nbytes // 8 + 1, dtype=torch.int64)  # a draw for eight bytes
    words.random_(generator=torch.Generator().manual_seed(seed))
    return made.copy_(words.view(torch.uint8)[:nbytes])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore("disk", [tmp_path], 64 << 20)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def folders(tmp_path: Path, count: int) -> list[Path]:
    made = [tmp_path / str(n) for n in range(count)]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(store: DiskStore, dtype: torch.dtype) -> None:
    data = noise(8 * 1001).view(dtype).reshape(7, -1)
    place, out = store.reserve(data.nbytes), torch.empty_like(data)
    store.write(place, data)
    store.read(place, out)
    assert torch.equal(out.view(torch.uint8), data.view(torch.uint8))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("nbytes", ODD_SIZES)
def test_odd_sizes_come_back_and_leave_their_neighbours(
    store: DiskStore, nbytes: int, aligned: bool
) -> None:
    sizes = (5, nbytes, 6)
    places = [store.reserve(size) for size in sizes]
    data = [noise(size, seed, aligned) for seed, size in enumerate(sizes)]
    for place, one in zip(places, data, strict=True):
        store.write(place, one)
    for place, one in zip(places, data, strict=True):
        out = noise(len(one) + 9, 7, aligned)
        rest = out[len(one) :].clone()
        store.read(place, out[: len(one)])
        assert torch.equal(out[: len(one)], one)
        assert torch.equal(out[len(one) :], rest), "wrote past the end of the tensor"
    assert store.bytes_read == store.bytes_written == sum(sizes)


def test_parts_of_a_place(store: DiskStore) -> None:
    data = noise(6 * BLOCK + 99)
    store.reserve(ALIGN)
    place = store.reserve(data.nbytes)
    store.write(place, data)
    change = noise(2 * BLOCK, 1)
    store.write(place, change, 3 * BLOCK)
    data[3 * BLOCK : 5 * BLOCK] = change
    for at, nbytes in ((0, BLOCK), (2 * BLOCK, 3 * BLOCK), (5 * BLOCK, BLOCK + 99)):
        out = noise(nbytes, 2)
        store.read(place, out, at)
        assert torch.equal(out, data[at : at + nbytes])


def test_nothing_is_fine_too(store: DiskStore) -> None:
    place = store.reserve(0)
    store.write(place, noise(0))
    store.read(place, noise(0))


@pytest.mark.parametrize("nbytes", [0, 1, ALIGN, BLOCK + 1, 3 * OPERATION, 3 * OPERATION + 5])
@pytest.mark.parametrize("direct", [True, False])
def test_operations_cover_every_byte_once(nbytes: int, direct: bool) -> None:
    parts = list(cut(nbytes, 2 * BLOCK, direct))
    assert [p.start for p in parts] == [sum(q.bytes for q in parts[:i]) for i in range(len(parts))]
    assert sum(part.bytes for part in parts) == nbytes
    assert all(part.at == part.start + 2 * BLOCK and part.at % BLOCK == 0 for part in parts)
    assert all(part.staged or part.bytes % ALIGN == 0 for part in parts)
    copied = sum(part.bytes for part in parts if part.staged)
    tail = 0 if nbytes % ALIGN == 0 else nbytes % BLOCK
    assert copied == (tail if direct else nbytes)
    assert cut(5, 0, True).__next__() == Part(0, 0, 5, True)


def test_aligned_memory_is_not_copied(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.memory import disk

    def refuse(*_: object, inward: bool) -> None:
        raise AssertionError("a copy through a buffer")

    monkeypatch.setattr(disk._Memory, "copy", refuse)
    place, data = store.reserve(3 * OPERATION), noise(3 * OPERATION)
    store.write(place, data)
    store.read(place, data)
    with pytest.raises(AssertionError, match="a copy"):
        store.write(place, noise(3 * OPERATION, 0, aligned=False))


def test_threads_do_not_meet(tmp_path: Path) -> None:
    size, wrong = 3 * OPERATION + 1234, []
    with_two = DiskStore("disk", folders(tmp_path, 2), 64 << 20)

    def work(seed: int) -> None:
        place = with_two.reserve(size)
        out = noise(size, 0, seed % 2 == 0)
        for turn in range(3):
            data = noise(size, 10 * seed + turn, seed % 2 == 1)
            with_two.write(place, data)
            with_two.read(place, out)
            if not torch.equal(out, data):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with_two.close()
    assert wrong == []
    assert with_two.bytes_read == with_two.bytes_written == 5 * 3 * size


@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("spoilt", [None, 0, 17 * OPERATION - 1])
def test_whoever_asks_sums_up_and_the_team_helps_where_that_is_slow(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, slowly: bool, spoilt: int | None
) -> None:
    from outsize.memory import disk

    real, summed, helped = disk.checksum, [], threading.Event()

    def slow(address: int, nbytes: int) -> int:
        name = threading.current_thread().name
        summed.append((name, address))
        while slowly and not helped.wait(0.01):  # until somebody else sums up too
            if {other for other, _ in summed} > {name}:
                helped.set()
        return real(address, nbytes)

    monkeypatch.setattr(disk, "checksum", slow)
    place, data, out = (
        store.reserve(17 * OPERATION),
        noise(17 * OPERATION),
        noise(17 * OPERATION, 1),
    )
    blocks = 17 * OPERATION // BLOCK
    for move, memory in ((store.write, data), (store.read, out)):
        summed.clear()
        helped.clear()
        if move == store.read and spoilt is not None:
            spoil(store._files[0], place.offset + spoilt)
            with pytest.raises(OutsizeError, match="are not those"):
                move(place, memory)
            return
        move(place, memory)
        assert sorted(at for _, at in summed) == [
            memory.data_ptr() + i * BLOCK for i in range(blocks)
        ]
        names = {name for name, _ in summed}
        assert not slowly or len(names) > 1
    assert torch.equal(out, data)


@pytest.mark.parametrize("files", [1, 2, 3])
def test_stripes_hold_every_byte_once(files: int) -> None:
    stripes, total = Stripes(files), 7 * STRIPE + 5 * ALIGN
    seen: dict[int, set[int]] = {n: set() for n in range(files)}
    for offset in range(0, total, 3 * ALIGN):
        for piece in stripes.pieces(offset, min(3 * ALIGN, total - offset)):
            pages = range(piece.offset // ALIGN, (piece.offset + piece.bytes) // ALIGN)
            assert not seen[piece.file] & set(pages)
            seen[piece.file] |= set(pages)
    shares = [stripes.share(total, n) for n in range(files)]
    assert [len(seen[n]) * ALIGN for n in range(files)] == shares
    assert sum(shares) == total and max(shares) - min(shares) <= STRIPE
    assert all(max(seen[n]) == shares[n] // ALIGN - 1 for n in range(files))


def test_stripes_spread_what_is_written(tmp_path: Path) -> None:
    store = DiskStore("disk", folders(tmp_path, 3), 6 * STRIPE)
    data = noise(6 * STRIPE)
    place = store.reserve(data.nbytes)
    store.write(place, data)
    for index, file in enumerate(store._files):
        assert os.fstat(file.handle).st_size == 2 * STRIPE
        first = os.pread(os.open(f"/proc/self/fd/{file.handle}", os.O_RDONLY), STRIPE, 0)
        assert first == bytes(data[index * STRIPE : (index + 1) * STRIPE].numpy())
    store.close()


def spoil(file: SpillFile, at: int, mask: int = 0x80) -> None:
    """Flip bits of one byte, as another process or the disk might."""
    handle = os.open(f"/proc/self/fd/{file.handle}", os.O_RDWR)
    (byte,) = os.pread(handle, 1, at)
    os.pwrite(handle, bytes([byte ^ mask]), at)
    os.fsync(handle)
    os.close(handle)


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 4 * BLOCK + 50])
def test_an_altered_byte_is_found(store: DiskStore, tmp_path: Path, at: int) -> None:
    first, place = store.reserve(1), store.reserve(4 * BLOCK + 51)
    store.write(first, noise(1))
    store.write(place, noise(4 * BLOCK + 51))
    spoil(store._files[0], place.offset + at)
    start = place.offset + at // BLOCK * BLOCK
    length = BLOCK if at < 4 * BLOCK else ALIGN
    with pytest.raises(OutsizeError) as error:
        store.read(place, noise(4 * BLOCK + 51))
    assert str(error.value) == (
        f"tier 'disk': {length:,} bytes at {start:,} under {tmp_path} are not those that were"
        " written: the disk, its memory or its cable is failing, or somebody altered the file; go"
        " on from the last checkpoint with a folder on another disk"
    )
    with pytest.raises(OutsizeError, match="are not those"):
        store.read(first, noise(1))


def test_two_flipped_signs_and_a_stale_block_are_found(tmp_path: Path) -> None:
    for damage in ("signs", "stale"):
        store = DiskStore("disk", [tmp_path], 4 * BLOCK)
        place, data = store.reserve(2 * BLOCK), noise(2 * BLOCK)
        store.write(place, data)
        if damage == "signs":
            spoil(store._files[0], 8 * 40 + 7)
            spoil(store._files[0], 8 * 72 + 7)
        else:
            old = os.pread(os.open(f"/proc/self/fd/{store._files[0].handle}", 0), BLOCK, BLOCK)
            store.write(place, noise(2 * BLOCK, 1))
            handle = os.open(f"/proc/self/fd/{store._files[0].handle}", os.O_RDWR)
            os.pwrite(handle, old, BLOCK)
        with pytest.raises(OutsizeError, match="are not those"):
            store.read(place, data)
        store.close()


def failing(call: str, code: int, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> list[int]:
    """The system call fails from some call on."""
    real, calls = getattr(os, call), [0]

    def broken(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*given)

    monkeypatch.setattr(os, call, broken)
    return calls


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    ("call", "code", "doing", "remedy"),
    [
        ("pwritev", errno.EIO, "writing to", "the disk is failing"),
        ("pwritev", errno.ENOSPC, "writing to", "free some space there"),
        ("pwritev", errno.EROFS, "writing to", "that can be written"),
        ("preadv", errno.EIO, "reading from", "go on from the last checkpoint"),
        ("preadv", errno.ESTALE, "reading from", "name a folder on another disk"),
    ],
)
def test_errors_of_the_system_are_one_line(
    call: str,
    code: int,
    doing: str,
    remedy: str,
    after: int,
    store: DiskStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, data = store.reserve(16 * OPERATION), noise(16 * OPERATION)
    if call == "preadv":
        store.write(place, data)
    calls = failing(call, code, monkeypatch, after)
    with pytest.raises(OutsizeError) as error:
        (store.write if call == "pwritev" else store.read)(place, data)
    assert str(error.value).startswith(
        f"tier 'disk': {doing} {tmp_path} failed ({os.strerror(code)}); "
    )
    assert remedy in str(error.value) and "\n" not in str(error.value)
    assert calls[0] <= after + THREADS, "went on after the first error"
    monkeypatch.undo()
    for use in (store.write, store.read):
        with pytest.raises(OutsizeError, match="failed"):
            use(place, data)
    with pytest.raises(OutsizeError, match="failed"):
        store.reserve(1)


def test_one_error_stops_the_other_threads_too(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwritev, [0]

    def once(*given: Any) -> int:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.EIO, "Input/output error")
        return int(real(*given))

    monkeypatch.setattr(os, "pwritev", once)
    with pytest.raises(OutsizeError, match="Input/output error"):
        store.write(store.reserve(30 * OPERATION), noise(30 * OPERATION))
    assert calls[0] < 20


def test_a_file_that_became_short_and_one_that_is_closed(tmp_path: Path) -> None:
    for damage, words in (("short", "ends too early"), ("closed", "Bad file descriptor")):
        store = DiskStore("disk", [tmp_path], 4 * BLOCK)
        place, data = store.reserve(4 * BLOCK), noise(4 * BLOCK)
        store.write(place, data)
        handle = store._files[0].handle
        if damage == "short":
            os.truncate(handle, BLOCK)
        else:
            os.close(handle)
        with pytest.raises(OutsizeError, match=words):
            store.read(place, data)
        if damage == "closed":
            store._files[0].handle = os.open(tmp_path, os.O_RDONLY)
        store.close()


def test_writes_that_the_system_cuts_short_go_on(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("pwritev", "preadv"):
        real = getattr(os, call)

        def some(handle: int, views: list[memoryview], at: int, real: Any = real) -> int:
            return int(
                real(handle, [views[0][: max(ALIGN, len(views[0]) // 2 // ALIGN * ALIGN)]], at)
            )

        monkeypatch.setattr(os, call, some)
    place, data = store.reserve(2 * OPERATION + 7), noise(2 * OPERATION + 7)
    out = noise(data.nbytes, 1)
    store.write(place, data)
    store.read(place, out)
    assert torch.equal(out, data)


def test_a_place_is_read_only_after_it_is_written(store: DiskStore) -> None:
    place = store.reserve(2 * BLOCK)
    store.write(place, noise(BLOCK))
    with pytest.raises(AssertionError, match="before any write"):
        store.read(place, noise(2 * BLOCK))


def test_more_than_was_declared(store: DiskStore) -> None:
    store.reserve(60 << 20)
    with pytest.raises(OutsizeError) as error:
        store.reserve((4 << 20) + 1)
    assert str(error.value) == (
        "tier 'disk': 4,194,305 bytes wanted, 4,194,304 of 67,108,864 free, 4,096 missing;"
        " declare a larger tier or another one"
    )
    store.reserve(4 << 20)


def test_more_than_the_disk_has_now(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    match = r"tier 'disk': .* bytes wanted under .*/0, .* free, .* missing; free some space"
    for count, capacity in ((1, free + (8 << 30)), (2, free + (8 << 30))):  # one disk, two folders
        at = tmp_path / str(count)
        at.mkdir()
        with pytest.raises(OutsizeError, match=match):
            DiskStore("disk", folders(at, count), capacity)
        assert [list(folder.iterdir()) for folder in at.iterdir()] == [[]] * count


def test_a_disk_that_is_full_when_space_is_taken(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("posix_fallocate", errno.ENOSPC, monkeypatch)
    with pytest.raises(OutsizeError, match=r"8,192 bytes wanted under .* missing; free some space"):
        store.reserve(5000)


def test_a_small_file_system_fills_up(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed")
    try:
        with pytest.raises(
            OutsizeError, match=r"9,437,184 bytes wanted under .* 1,048,576 missing"
        ):
            DiskStore("disk", [tmp_path], 9 << 20)
        store = DiskStore("disk", [tmp_path], 8 << 20)
        place, data = store.reserve(3 << 20), noise(3 << 20)
        store.write(place, data)
        (tmp_path / "else").write_bytes(bytes(4 << 20))  # somebody else was quicker
        with pytest.raises(OutsizeError) as error:
            store.reserve(3 << 20)
        assert str(error.value) == (
            f"tier 'disk': 3,145,728 bytes wanted under {tmp_path}, 1,048,576 free, 2,097,152"
            " missing; free some space there, or name a folder on another disk"
        )
        out = noise(3 << 20, 1)
        store.read(place, out)
        assert torch.equal(out, data), "a reservation that fails harms nothing"
        store.close()
        remount = ["mount", "-o", "remount,ro", str(tmp_path)]
        assert subprocess.run(remount, capture_output=True).returncode == 0
        with pytest.raises(OutsizeError, match=r"Read-only file system\); name a folder on a disk"):
            DiskStore("disk", [tmp_path], 1 << 20)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_limit_on_file_sizes(store: DiskStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OutsizeError, match=r"File too large\); raise the limit .*ulimit -f"):
            store.reserve(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_folders_that_take_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    good = tmp_path / "good"
    good.mkdir()
    open_before = len(os.listdir("/proc/self/fd"))
    for name, reason in (("none", "No such file"), ("file", "Not a directory")):
        match = f"tier 'disk': making a file in {tmp_path / name} failed \\({reason}"
        with pytest.raises(OutsizeError, match=match):
            DiskStore("disk", [good, tmp_path / name], 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == open_before
    if os.geteuid() != 0:
        good.chmod(0o500)
        with pytest.raises(
            OutsizeError, match=r"Permission denied\); name a folder that this user"
        ):
            DiskStore("disk", [good], 1 << 20)


def test_file_systems_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, advised = os.open, []

    def older(name: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", older)
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: advised.append(given[1:]))
    store = DiskStore("disk", [tmp_path], 4 << 20)
    place, data, out = store.reserve(3 << 20), noise(3 << 20), noise(3 << 20, 1)
    store.write(place, data)
    store.read(place, out)
    store.close()
    assert torch.equal(out, data)
    pieces = [(0, OPERATION, os.POSIX_FADV_DONTNEED), (OPERATION, BLOCK, os.POSIX_FADV_DONTNEED)]
    assert sorted(advised) == sorted(2 * pieces)


CHILD = """
import sys
from pathlib import Path
from outsize.memory.disk import DiskStore
from outsize.memory.store import pool
store = DiskStore("disk", [Path(p) for p in sys.argv[1:]], 64 << 20)
data = pool(32 << 20)
store.write(store.reserve(data.nbytes), data)
"""


def killed(folders: list[Path]) -> int:
    """How a process ends that is killed while it writes."""
    ready, said = os.pipe()
    if (pid := os.fork()) == 0:
        store, data = DiskStore("disk", folders, 64 << 20), pool(32 << 20)
        place = store.reserve(data.nbytes)
        store.write(place, data)
        os.write(said, b"r")
        while True:
            store.write(place, data)
    os.close(said)
    try:
        assert os.read(ready, 1) == b"r"
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return ended


@pytest.mark.parametrize("how", ["end", "kill"])
def test_nothing_is_left_behind(tmp_path: Path, how: str) -> None:
    two = folders(tmp_path, 2)
    if how == "kill":
        assert killed(two) == -signal.SIGKILL
    else:
        command = [sys.executable, "-c", CHILD, *map(str, two)]
        assert subprocess.run(command, timeout=600, check=False).returncode == 0
    assert [list(folder.iterdir()) for folder in two] == [[], []]


@pytest.mark.parametrize("aligned", [True, False])
def test_memory_does_not_grow_while_a_gibibyte_passes(tmp_path: Path, aligned: bool) -> None:
    data = noise(32 << 20, 0, aligned)
    before = resident()
    store = DiskStore("disk", [tmp_path], 64 << 20)
    place = store.reserve(data.nbytes)
    made = resident()
    assert made - before < staging_bytes() + (2 << 20)
    for _ in range(16):
        store.write(place, data)
        store.read(place, data)
    assert resident() - made < 4 << 20  # stacks of the threads
    assert store.bytes_read + store.bytes_written == 1 << 30
    store.close()
    assert resident() - before < 6 << 20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_of_a_gpu_go_through_buffers(store: DiskStore) -> None:
    place, data = store.reserve(3 * OPERATION + 5), noise(3 * OPERATION + 5).cuda()
    store.write(place, data)
    out = torch.zeros_like(data)
    store.read(place, out)
    assert torch.equal(out, data)
