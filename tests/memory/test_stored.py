"""Bytes of files read in place, against the files themselves."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from outsize.errors import OutsizeError
from outsize.hardware.disk import OPERATION, THREADS
from outsize.memory.store import ALIGN
from outsize.memory.stored import STAGING, Copy, StoredFiles, buffers_of, operations

SIZE = 2 * OPERATION + 12345


@pytest.fixture
def files(tmp_path: Path) -> dict[Path, bytes]:
    made = {tmp_path / name: random.randbytes(SIZE) for name in ("a", "b")}
    for path, content in made.items():
        path.write_bytes(content)
    return made


def _some(files: dict[Path, bytes], count: int) -> list[Copy]:
    copies, to = [], 0
    for path in files:
        start = 0
        for _ in range(count):
            start += random.choice((0, 1, 77, ALIGN, 3 * ALIGN))
            length = random.choice((0, 3, 4000, 70_001, OPERATION + 17))
            length = max(0, min(length, SIZE - start))
            copies.append(Copy(path, start, to, length))
            start, to = start + length, to + length + random.choice((0, 5, 64))
    return copies


@pytest.mark.parametrize("seed", range(6))
def test_any_spans_of_several_files(files: dict[Path, bytes], seed: int) -> None:
    random.seed(seed)
    copies = _some(files, 8)
    random.shuffle(copies)
    end = max(copy.to + copy.bytes for copy in copies)
    out = torch.full((end,), 111, dtype=torch.uint8)
    expected = bytearray(out.numpy().tobytes())
    for copy in copies:
        expected[copy.to : copy.to + copy.bytes] = files[copy.path][copy.start : copy.stop]
    reader = StoredFiles(files)
    reader.read(operations(copies), out)
    assert out.numpy().tobytes() == bytes(expected)
    assert reader.bytes_read == sum(copy.bytes for copy in copies)
    reader.close()


def test_neighbours_share_an_operation_and_far_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    near = [Copy(path, 100 + 50 * i, 50 * i, 50) for i in range(9)]
    assert len(operations(near)) == 1
    assert len(operations([*near, Copy(path, 1 << 20, 450, 8)])) == 2
    (whole,) = operations([Copy(path, 5000, 0, 10)])
    assert whole.start == ALIGN and whole.stop == 5010  # as far as is wanted: no file is longer
    assert all(each.stop - each.start <= OPERATION for each in operations([Copy(path, 7, 0, SIZE)]))
    (around,) = operations([Copy(path, 0, 0, 900), Copy(path, 100, 900, 50)])
    assert around.stop == 900, "the last to begin ends first"


def test_a_file_cut_meanwhile(files: dict[Path, bytes]) -> None:
    path, other, *_ = files
    reader = StoredFiles(files)
    os.truncate(path, 3 * ALIGN)
    out = torch.zeros(2 * ALIGN, dtype=torch.uint8)
    with pytest.raises(OutsizeError) as error:
        reader.read(operations([Copy(path, 2 * ALIGN, 0, 2 * ALIGN)]), out)
    assert str(error.value) == (
        f"{path} is truncated: it ends at byte 12,288, expected 16,384 at least; copy or download"
        " it again"
    )
    reader.read(operations([Copy(other, 5, 0, 2 * ALIGN)]), out)  # it can go on
    assert out.numpy().tobytes() == files[other][5 : 5 + 2 * ALIGN]
    with pytest.raises(OutsizeError, match="is truncated: it ends at byte 12,288"):
        reader.read(operations([Copy(path, 5, 0, 2 * ALIGN)]), out)
    reader.close()


def test_a_file_written_meanwhile(files: dict[Path, bytes]) -> None:
    """By somebody else; one that takes its name is another."""
    path, other, *_ = files
    reader, out = StoredFiles(files), torch.zeros(ALIGN, dtype=torch.uint8)
    fresh = other.with_name("fresh")
    fresh.write_bytes(bytes(len(files[other])))
    os.replace(fresh, other)
    reader.read(operations([Copy(other, 5, 0, ALIGN)]), out)
    assert out.numpy().tobytes() == files[other][5 : 5 + ALIGN]
    with path.open("r+b") as file:
        file.write(b"another")
    written = path.stat()
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns + 1))  # whatever a clock's tick is
    with pytest.raises(OutsizeError) as error:
        reader.read(operations([Copy(path, 2 * ALIGN, 0, ALIGN)]), out)
    assert str(error.value).startswith(f"{path} has been written since it was opened")
    reader.close()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutsizeError, match=r"cannot read .*/x: No such file or directory"):
        StoredFiles([tmp_path / "x"])


def test_small_buffers_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 400)
    for total, count in ((0, 1), (200_000, 3), (1 << 40, THREADS)):
        buffers = buffers_of(total)
        assert buffers.count == count and buffers.bytes % ALIGN == 0
        assert buffers.total <= max(2 * ALIGN, min(total, STAGING))
        reader, out = StoredFiles([path], buffers), torch.zeros(100_000, dtype=torch.uint8)
        reader.read(operations([Copy(path, 77, 0, 100_000)], buffers.bytes), out)
        reader.close()
        assert out.numpy().tobytes() == path.read_bytes()[77:100_077]
