"""safetensors files: read and written alike by the safetensors library; every kind of damage is one
clear error; memory beside the tensor stays bounded."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outsize.checkpoint import files, writing
from outsize.checkpoint.files import DTYPES, file_crc32, read_header, read_json, read_tensor
from outsize.checkpoint.manifest import FileEntry
from outsize.checkpoint.writing import Later, write_json, write_tensors
from outsize.errors import OutsizeError
from outsize.hardware import host
from outsize.kernels.pieces import PIECE_ELEMENTS, pieces

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def sample() -> dict[str, Tensor]:
    """Odd sizes in narrow dtypes first, so that careless offsets would be misaligned."""
    return {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(7).bfloat16(),
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "turned": torch.randn(40, 30).t(),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
        'name/../../with "quotes" and \u00e4': torch.randn(2),
    }


def write(path: Path, tensors: dict[str, Tensor]) -> FileEntry:
    return write_tensors(path, "weights", tensors)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def test_our_file_is_read_by_the_library_and_by_us(tmp_path: Path) -> None:
    tensors, path = sample(), tmp_path / "a.safetensors"
    written = write(path, tensors)
    theirs, header = load_file(path), read_header(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == header.metadata == {"format": "pt"}
    assert theirs.keys() == header.entries.keys() == tensors.keys()
    for name, x in tensors.items():
        assert same(theirs[name], x)
        assert same(read_tensor(header, name, checksum=written.tensors[name].crc32), x)
        assert header.entries[name].start % x.dtype.itemsize == 0


def test_the_librarys_file_is_read_by_us(tmp_path: Path) -> None:
    tensors = {name: x.contiguous() for name, x in sample().items()}
    save_file(tensors, tmp_path / "a.safetensors", {"made": "elsewhere"})
    header = read_header(tmp_path / "a.safetensors")
    assert header.metadata == {"made": "elsewhere"}
    assert all(same(read_tensor(header, name), x) for name, x in tensors.items())


def test_checksums_are_those_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written = write(path, sample())
    data, header = path.read_bytes(), read_header(path)
    assert written.bytes == len(data) == header.bytes
    assert file_crc32(path) == zlib.crc32(data)
    first = min(entry.start for entry in header.entries.values())
    assert written.crc32 == header.crc32 == zlib.crc32(data[:first])
    for name, one in written.tensors.items():
        entry = header.entries[name]
        part = data[entry.start : entry.stop]
        assert (len(part), zlib.crc32(part)) == (one.bytes, one.crc32)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_reading_into_a_tensor_casts(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(60, 50, dtype=torch.float64).to(stored)
    write(tmp_path / "a", {"x": x})
    header = read_header(tmp_path / "a")
    monkeypatch.setattr(files, "pieces", lambda y: pieces(y, 128))
    for out in (
        torch.empty(60, 50, dtype=wanted),
        torch.empty(50, 60, dtype=wanted).t(),
        torch.nn.Parameter(torch.empty(60, 70, dtype=wanted)[:, 10:60]),
    ):
        assert (
            read_tensor(header, "x", out, checksum=zlib.crc32(x.view(torch.uint8).numpy())) is out
        )
        assert torch.equal(out, x.to(wanted))


def test_reading_needs_a_few_megabytes_beside_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", {"x": torch.ones(6_000_000)})
    largest = []
    make = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        largest.append(make(*args, **kwargs))
        return largest[-1]

    out = torch.empty(6_000_000, dtype=torch.bfloat16)
    monkeypatch.setattr(files.torch, "empty", counting)
    read_tensor(read_header(tmp_path / "a"), "x", out)
    assert out.sum(dtype=torch.float64) == 6_000_000
    assert 0 < max(x.numel() for x in largest) <= PIECE_ELEMENTS


def raw(table: Any, body: int, text: bytes | None = None) -> bytes:
    text = json.dumps(table).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + bytes(body)


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


def tensor(start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes"),
    "header cut": (raw(one(), 24)[:40], "truncated: 40 bytes"),
    "body cut": (raw(one(), 23), "truncated in tensor 'w'"),
    "trailing": (raw(one(), 25), "1 bytes after its last tensor"),
    "pickle": (b"PK\x03\x04" + bytes(200), "not a safetensors file"),
    "text": (b"hello, this is no tensor file", "not a safetensors file"),
    "huge header": (b"\xff" * 8 + b"{", "not a safetensors file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
    "not json": (raw(None, 0, b'{"w": '), "header is damaged"),
    "not utf8": (raw(None, 0, b'{"\xff": 1}'), "header is damaged"),
    "deep": (raw(None, 0, b'{"w":' + b"[" * 100_000), "header is damaged"),
    "twice": (
        raw(None, 1, b'{"w":%b,"w":%b}' % ((json.dumps(tensor(0, 1)).encode(),) * 2)),
        "twice",
    ),
    "metadata": (raw({"__metadata__": {"a": 1}}, 0), "__metadata__"),
    "no dict": (raw({"w": 1}, 0), "tensor 'w'"),
    "missing key": (raw({"w": {"dtype": "F32", "shape": [1]}}, 4), "tensor 'w'"),
    "dtype": (raw(one(dtype="F31"), 24), "tensor 'w': dtype 'F31'"),
    "dtype type": (raw(one(dtype=["F32"]), 24), "tensor 'w': dtype"),
    "shape": (raw(one(shape=[2, 4]), 24), "24 bytes, expected 32"),
    "negative": (raw(one(shape=[-2, -3]), 24), "tensor 'w'"),
    "bool": (raw(one(shape=[True, 6]), 24), "tensor 'w'"),
    "float": (raw(one(shape=[2.0, 3]), 24), "tensor 'w'"),
    "overflow": (raw(one(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0]), 1), "after its last"),
    "too large": (raw(one(shape=[1 << 70, 0], data_offsets=[0, 0]), 0), "tensor 'w'"),
    "backwards": (raw(one(data_offsets=[24, 0]), 24), "expected 24"),
    "three": (raw(one(data_offsets=[0, 12, 24]), 24), "tensor 'w'"),
    "outside": (raw(one(data_offsets=[1000, 1024]), 24), "tensor 'w'"),
    "overlap": (
        raw({"a": tensor(0, 8), "b": tensor(4, 12)}, 12),
        "'b': damaged header, it overlaps",
    ),
    "gap": (
        raw({"a": tensor(0, 8), "b": tensor(9, 12)}, 12),
        "'b': damaged header, it leaves a gap",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_naming_file_and_cause(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(DAMAGE[kind][0])
    with pytest.raises(OutsizeError) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message and DAMAGE[kind][1] in message and "\n" not in message


def test_any_cut_and_any_flipped_header_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    """A cut is always refused. A flipped bit of the header is refused, or changes only what no
    size can contradict (a name, a dtype of equal width, a shape of equal size): then the header's
    checksum differs. Never another exception."""
    path, damaged = tmp_path / "a", tmp_path / "b"
    written = write(path, {"first": torch.randn(4, 4), "second": torch.randn(8).bfloat16()})
    good = path.read_bytes()
    base = min(entry.start for entry in read_header(path).entries.values())
    for size in range(len(good)):
        damaged.write_bytes(good[:size])
        with pytest.raises(OutsizeError):
            read_header(damaged)
    for bit in range(8 * base):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(bad)
        try:
            header = read_header(damaged)
        except OutsizeError:
            continue
        assert header.crc32 != written.crc32


def test_any_flipped_bit_of_a_tensor_is_found_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a"
    written = write(path, {"x": torch.randn(50, 20), "y": torch.randn(7).half()})
    header, good = read_header(path), path.read_bytes()
    rng = random.Random(1)
    for _ in range(50):
        name = rng.choice(["x", "y"])
        entry = header.entries[name]
        bad = bytearray(good)
        bad[rng.randrange(entry.start, entry.stop)] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(OutsizeError, match=f"tensor '{name}' is damaged"):
            read_tensor(read_header(path), name, checksum=written.tensors[name].crc32)


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, {"x": torch.randn(100)})
    header = read_header(path)
    os.truncate(path, header.bytes - 1)
    with pytest.raises(OutsizeError, match="truncated in tensor 'x'"):
        read_tensor(header, "x")


def test_absent_name_and_other_shape(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": torch.randn(2, 3)})
    header = read_header(tmp_path / "a")
    with pytest.raises(OutsizeError, match="no tensor 'y'"):
        read_tensor(header, "y")
    with pytest.raises(OutsizeError, match=r"'x' has shape \(2, 3\), expected \(3, 2\)"):
        read_tensor(header, "x", torch.empty(3, 2))


@pytest.mark.parametrize("reader", [read_header, read_json])
def test_missing_file_and_directory(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    with pytest.raises(OutsizeError, match="No such file"):
        reader(tmp_path / "nowhere")
    with pytest.raises(OutsizeError, match="Is a directory"):
        reader(tmp_path)


def test_writing_takes_one_tensor_at_a_time_in_any_order(tmp_path: Path) -> None:
    alive = 0

    class Counted:
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def make(i: int) -> Tensor:
        nonlocal alive
        x = torch.full((10,), float(i))
        x.counted = Counted()  # type: ignore[attr-defined]
        alive += 1
        assert alive == 1
        return x

    later = {str(i): Later(torch.float32, (10,), partial(make, i)) for i in (3, 0, 4, 1, 2)}
    write_tensors(tmp_path / "a", "weights", later)
    assert not alive
    assert {n: x[0].item() for n, x in load_file(tmp_path / "a").items()} == {
        str(i): float(i) for i in range(5)
    }


def test_nothing_stays_of_a_write_that_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")

    def broken() -> Tensor:
        raise RuntimeError("the source broke")

    later = Later(torch.float32, (3,), broken)
    with pytest.raises(RuntimeError):
        write_tensors(tmp_path / "a", "weights", {"x": torch.ones(3), "y": later})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "pwrite", full)
    with pytest.raises(OutsizeError, match=r"cannot write .*a: No space left on device; it needs"):
        write(tmp_path / "a", sample())
    assert not list(tmp_path.iterdir())


def test_json_round_trip_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"\u00e4": [1, None, 2.5]})
    assert read_json(path) == {"\u00e4": [1, None, 2.5]}
    path.write_text("[1]")
    with pytest.raises(OutsizeError, match="holds a JSON list"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(OutsizeError, match="not valid JSON"):
        read_json(path)


def test_every_dtype_code_is_the_librarys(tmp_path: Path) -> None:
    tensors = {
        c: torch.zeros(2 * DTYPES[c].itemsize, dtype=torch.uint8).view(DTYPES[c]) for c in DTYPES
    }
    save_file(tensors, tmp_path / "a")
    entries = read_header(tmp_path / "a").entries
    assert {name: entry.dtype for name, entry in entries.items()} == dict(DTYPES)


def cached(path: Path) -> float:
    """The part of a file's pages that is in the page cache."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as region:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = (ctypes.c_char * size).from_buffer(region)
        assert ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.parametrize(("memory", "stays"), [(1 << 40, True), (1 << 20, False)])
def test_what_is_large_beside_the_memory_leaves_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, stays: bool
) -> None:
    made = {f"{n}": torch.randn(3, 1_000_001) for n in range(4)}
    write(tmp_path / "a", made)
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if cached(tmp_path / "a"):
        pytest.skip("a file system in memory")
    monkeypatch.setattr(files, "SMALL", 1 << 20)
    monkeypatch.setattr(files.host, "memory", lambda: host.Memory(memory, memory))
    header = read_header(tmp_path / "a")
    for name, x in made.items():
        assert torch.equal(read_tensor(header, name), x)
    # The system takes pages back when it likes, a few at a time; what is told to leave is gone.
    assert cached(tmp_path / "a") > 0.5 if stays else cached(tmp_path / "a") < 0.02


def test_a_small_file_is_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.host, "memory", lambda: pytest.fail("asked for every small file"))
    write(tmp_path / "a", {"x": torch.ones(3)})
    assert read_tensor(read_header(tmp_path / "a"), "x").sum() == 3
