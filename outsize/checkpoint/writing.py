"""Writing files that are complete or absent: synced before they get their name, and a safetensors
file tensor by tensor, with the checksum of each tensor and of the header made in the same pass."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from outsize.checkpoint.files import CODES, memory_of
from outsize.checkpoint.manifest import FileEntry, TensorEntry
from outsize.errors import OutsizeError
from outsize.kernels.pieces import pieces


@dataclass(frozen=True)
class Later:
    """A tensor that `make` gives when it is written, and that nobody holds before or after."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, group: str, tensors: Mapping[str, Tensor | Later]) -> FileEntry:
    """Write tensors by name as a safetensors file of a group; gives its entry.

    They are made in the order in which they are given, one at a time, and a few megabytes beside
    it. The file is synced and appears under its name only when complete. OutsizeError where the
    system refuses.
    """
    # wider dtypes first, so that every tensor is aligned for readers that map the file
    ordered = dict(sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize))
    head, starts = _header_bytes(ordered)
    size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    entries: dict[str, TensorEntry] = {}
    with _new_file(path, size) as fd:
        _write_all(fd, memoryview(head), 0)
        for name, like in tensors.items():
            tensor = like.make() if isinstance(like, Later) else like
            code, shape = CODES[like.dtype], tuple(like.shape)
            assert (tensor.dtype, tuple(tensor.shape)) == (like.dtype, shape), name
            checksum = _write_from(tensor.detach(), fd, len(head) + starts[name])
            entries[name] = TensorEntry(code, shape, like.nbytes, checksum)
            del tensor  # before the next is made
    return FileEntry(size, crc32(head), group, entries)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON: synced, and under its name only when complete."""
    data = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    with _new_file(path, len(data)) as fd:
        _write_all(fd, memoryview(data), 0)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def scratch(final: Path) -> Iterator[Path]:
    """An empty directory beside `final`, whose parents are made, for what shall have that name.
    It is gone afterwards, and what a killed process left there before. OutsizeError where another
    process writes there; OSError as it comes."""
    part = final.with_name(f".{final.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    held = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(held, final)
        for left in part.iterdir():
            remove(left)
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(held)


def _lock(held: int, final: Path) -> None:
    """Hold a directory as long as its descriptor is open, where its file system can."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutsizeError(
            f"{final} is being written by another process; wait for it, or choose another path"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            raise


def remove(path: Path) -> None:
    """Remove a file or a directory as far as the system lets us: it is rubbish by its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _header_bytes(tensors: Mapping[str, Tensor | Later]) -> tuple[bytes, dict[str, int]]:
    """The header of tensors in the order of their bytes, and where each begins behind it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name, tensor in tensors.items():
        span = [at, at + tensor.nbytes]
        code, shape = CODES[tensor.dtype], list(tensor.shape)
        table[name] = {"dtype": code, "shape": shape, "data_offsets": span}
        starts[name], at = span
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


@contextmanager
def _new_file(path: Path, size: int) -> Iterator[int]:
    """A descriptor to write to; the file gets its name, durably, when the body ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = f"; it needs {size} bytes: free some or save elsewhere" if full else ""
        raise OutsizeError(f"cannot write {path}: {error.strerror}{remedy}") from error


def _write_from(x: Tensor, fd: int, at: int) -> int:
    """Write the elements of x in row-major order and return the CRC-32 of their bytes."""
    value = 0
    for piece in pieces(x):
        view = memory_of(piece.cpu().contiguous())
        _write_all(fd, view, at)
        value = crc32(view, value)
        at += len(view)
    return value


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count
