"""Reading one safetensors file: its header checked before anything in it is believed, its tensors
read straight to where they belong.

A file is an 8-byte length, a JSON header of that length (name -> dtype, shape, span of bytes) and
the bytes of the tensors, which cover the rest of the file exactly. Reading uses `pread`, not a
mapping: a file that shrinks meanwhile is an error and not a killed process. Names in a header are
keys only and never become paths.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.hardware import host
from outsize.kernels.pieces import pieces

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library

# What was read of a large file leaves the page cache again: there it is a second copy in memory
# that may be short, and counts as the process's own under the limit of a control group. Direct
# reads would leave nothing either, but are half as fast here (1.8 of 3.7 GB/s): the system reads
# ahead while a checksum is taken.
LARGE = 0.25  # of the memory that this process may hold
SMALL = 64 << 20  # bytes up to which nobody asks how much that is
AHEAD = 16 << 20  # bytes that the system may have read ahead, 8 MiB here

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
CODES: Mapping[torch.dtype, str] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `start` and `stop` are offsets in the file, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a checked file holds, in the order of its bytes; `crc32` is that of all before them."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    bytes: int
    crc32: int

    @cached_property
    def large(self) -> bool:
        """Whether it is so much of the memory that what was read is to leave the page cache: asked
        once for all its tensors."""
        return self.bytes > SMALL and self.bytes > LARGE * host.memory().total


def read_header(path: Path) -> Header:
    """The header of the safetensors file at `path`, fully checked against the file's size.

    OutsizeError, naming file and tensor, for a file that is missing, truncated or something else.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            lead = file.read(8)
            length = int.from_bytes(lead, "little")
            _check_lead(path, lead + file.peek(24)[:24], size, length)
            text = file.read(length)
    except OSError as error:
        raise OutsizeError(f"cannot read {path}: {error.strerror}") from error
    table, metadata = _parse(path, text)
    entries = sorted(
        (_entry(path, name, value, 8 + length) for name, value in table.items()),
        key=lambda entry: (entry.start, entry.stop),
    )
    _check_spans(path, entries, 8 + length, size)
    checksum = crc32(text, crc32(lead))
    return Header(path, MappingProxyType({e.name: e for e in entries}), metadata, size, checksum)


def read_tensor(
    header: Header, name: str, out: Tensor | None = None, checksum: int | None = None
) -> Tensor:
    """The tensor `name`, cast into `out` (its shape; any dtype, device, strides) or as a new one.

    Needs a few megabytes beside the result, and leaves no more in the page cache where the file is
    large. With `checksum` (CRC-32 of the stored bytes) the bytes are verified as they
    pass. OutsizeError, naming file and tensor, for an absent name, another
    shape, a file cut meanwhile, wrong bytes.
    """
    entry = header.entries.get(name)
    if entry is None:
        raise OutsizeError(f"{header.path}: no tensor {name!r}")
    if out is None:
        out = torch.empty(entry.shape, dtype=entry.dtype)
    elif tuple(out.shape) != entry.shape:
        raise OutsizeError(
            f"{header.path}: tensor {name!r} has shape {entry.shape}, expected {tuple(out.shape)}"
        )
    try:
        found = _read_into(out.detach(), header, entry)
    except OSError as error:
        raise OutsizeError(f"{header.path}: tensor {name!r}: {error.strerror}") from error
    if checksum is not None and found != checksum:
        raise damaged(header, name, found, checksum)
    return out


def damaged(header: Header, name: str, found: int, expected: int) -> OutsizeError:
    """For a tensor whose bytes have another checksum than is known."""
    return OutsizeError(
        f"{header.path}: tensor {name!r} is damaged (checksum {found:08x}, expected "
        f"{expected:08x}): restore the file from a copy"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`. OutsizeError if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise OutsizeError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OutsizeError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise OutsizeError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def file_crc32(path: Path, start: int = 0, stop: int | None = None) -> int:
    """CRC-32 of a file from `start` to `stop`, or to its end, read in pieces that stay in the
    processor's cache; of what there is where it ends before. OSError if it cannot be read."""
    value = 0
    with path.open("rb", buffering=0) as file:
        left = (os.fstat(file.fileno()).st_size if stop is None else stop) - start
        buffer = memoryview(bytearray(min(1 << 20, left)))
        file.seek(start)
        while left and (count := file.readinto(buffer[:left])):
            value, left = crc32(buffer[:count], value), left - count
    return value


def memory_of(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(x.view(-1).view(torch.uint8).numpy().data)


def _check_lead(path: Path, lead: bytes, size: int, length: int) -> None:
    if lead.startswith(b"version https://git-lfs"):
        raise OutsizeError(f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull'")
    if size < 8:
        raise OutsizeError(f"{path} is truncated: {size} bytes, expected a safetensors header")
    if length > MAX_HEADER or lead[8:9] not in (b"{", b""):
        raise OutsizeError(f"{path} is not a safetensors file: no header at its start")
    if 8 + length > size:
        raise OutsizeError(
            f"{path} is truncated: {size} bytes, its header alone has {8 + length}; "
            "copy or download it again"
        )


def _parse(path: Path, text: bytes) -> tuple[dict[str, Any], Mapping[str, str]]:
    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) < len(items):
            raise ValueError("a name occurs twice")
        return table

    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise OutsizeError(f"{path}: its safetensors header is damaged: {error}") from error
    if not isinstance(table, dict):
        raise OutsizeError(f"{path}: its safetensors header is damaged: not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise OutsizeError(f"{path}: its safetensors header is damaged: __metadata__ is not text")
    return table, MappingProxyType(metadata)


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise OutsizeError(f"{where}: damaged header, expected dtype, shape and data_offsets")
    code, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise OutsizeError(f"{where}: dtype {code!r}, expected one of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise OutsizeError(f"{where}: damaged header, shape {shape!r}, data_offsets {span!r}")
    dtype = DTYPES[code]
    expected, found = prod(shape) * dtype.itemsize, span[1] - span[0]
    if expected != found:
        raise OutsizeError(
            f"{where}: damaged header, {found} bytes, expected {expected} for {code} {shape}"
        )
    return Entry(name, dtype, tuple(shape), base + span[0], base + span[1])


def _are_sizes(value: Any) -> bool:
    """A list of plausible sizes: each fits 63 bits, as torch's do."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_spans(path: Path, entries: list[Entry], base: int, size: int) -> None:
    """The tensors must cover the file from the header to its end: no overlap, no hidden bytes."""
    reached = base
    for entry in entries:
        if entry.start != reached:
            wrong = "overlaps another" if entry.start < reached else "leaves a gap before it"
            raise OutsizeError(f"{path}: tensor {entry.name!r}: damaged header, it {wrong}")
        reached = entry.stop
    if reached > size:
        first = next(entry.name for entry in entries if entry.stop > size)
        raise OutsizeError(
            f"{path} is truncated in tensor {first!r}: {size} bytes, expected {reached}; "
            "copy or download it again"
        )
    if reached < size:
        raise OutsizeError(f"{path}: {size - reached} bytes after its last tensor; damaged")


def _read_into(out: Tensor, header: Header, entry: Entry) -> int:
    """Fill `out` from the entry's bytes and return their CRC-32."""
    at, value = entry.start, 0
    fd = os.open(header.path, os.O_RDONLY)
    try:
        for piece in pieces(out):
            direct = piece.dtype == entry.dtype and piece.is_contiguous() and piece.is_cpu
            stored = piece if direct else torch.empty(piece.shape, dtype=entry.dtype)
            view = memory_of(stored)
            read_all(fd, view, at, header.path, entry.name)
            value = crc32(view, value)
            at += len(view)
            if header.large:  # and what was read ahead of another tensor, far behind
                os.posix_fadvise(fd, 0, at, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(fd, at + AHEAD, 0, os.POSIX_FADV_DONTNEED)
            if not direct:
                piece.copy_(stored)
    finally:
        os.close(fd)
    return value


def read_all(fd: int, view: memoryview, at: int, path: Path, name: str) -> None:
    """Fill `view` with a tensor's bytes, from byte `at` on. OutsizeError where the file ends."""
    while view:
        count = os.preadv(fd, [view], at)
        if count == 0:
            raise OutsizeError(f"{path} is truncated in tensor {name!r}: it ends at byte {at}")
        view, at = view[count:], at + count
