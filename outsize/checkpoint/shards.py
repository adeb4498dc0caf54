"""The tensors of a Hugging Face directory: one safetensors file, or shards behind an index.

Beside them our own `save` leaves outsize.json with sizes and checksums. Where it is present every
byte is verified as it is read; a directory from elsewhere has none and cannot be.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from outsize.checkpoint.files import (
    Entry,
    Header,
    damaged,
    file_crc32,
    read_header,
    read_json,
    read_tensor,
)
from outsize.checkpoint.manifest import FileEntry
from outsize.errors import OutsizeError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUMS = "outsize.json"
SUMS_FORMAT = 1
SAMPLES, SAMPLE = 256, 4096  # places of a file, and the bytes there, that tell it from another


@dataclass(frozen=True)
class Shards:
    """Which checked file holds each tensor, and the checksums known for them."""

    directory: Path
    where: Mapping[str, Header]
    sums: Mapping[str, Mapping[str, int]]  # file name -> tensor name -> CRC-32

    def entry(self, name: str) -> Entry:
        return self.where[name].entries[name]

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """The tensor `name`, cast into `out` if given; verified where its checksum is known."""
        header = self.where[name]
        checksum = self.sums.get(header.path.name, {}).get(name)
        return read_tensor(header, name, out, checksum)

    def verify(self) -> None:
        """Read every tensor whose checksum is known, and leave none of it in the page cache.
        OutsizeError, naming file and tensor, for one that is damaged."""
        for name, header in self.where.items():
            expected = self.sums.get(header.path.name, {}).get(name)
            if expected is None:
                continue
            entry = header.entries[name]
            found = file_crc32(header.path, entry.start, entry.stop)
            with header.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, entry.stop, os.POSIX_FADV_DONTNEED)
            if found != expected:
                raise damaged(header, name, found, expected)


def open_shards(directory: Path) -> Shards:
    """The tensors in `directory`, every file's header checked and compared with outsize.json.

    OutsizeError, naming file and tensor, for weights that are absent, in a pickle, damaged, or
    not where the index says.
    """
    if (directory / INDEX).exists():
        mapped = _read_index(directory / INDEX)
        names = sorted(set(mapped.values()))
    elif (directory / SINGLE).exists():
        mapped, names = {}, [SINGLE]
    else:
        raise OutsizeError(_why_absent(directory))
    headers = {name: read_header(_shard(directory, name)) for name in names}
    sums = _read_sums(directory, headers) if (directory / SUMS).exists() else {}
    where: dict[str, Header] = {}
    for header in headers.values():
        for name in header.entries:
            # a tensor that is in several files is the one that the index names
            if mapped.get(name, header.path.name) == header.path.name:
                where[name] = header
    for name, file in mapped.items():
        if name not in where:
            raise OutsizeError(
                f"{directory / file}: no tensor {name!r}, which {INDEX} places there"
            )
    return Shards(directory, MappingProxyType(where), sums)


def fingerprint(directory: Path) -> str:
    """Of a directory's weights, without reading all of large ones: the files' sizes and headers,
    and some bytes at places that lie evenly in them. OutsizeError as of open_shards."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({header.path for header in open_shards(directory).where.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            (head,) = struct.unpack("<Q", file.read(8))
            digest.update(file.read(head))
            for place in range(head + 8, size, max(SAMPLE, (size - head) // SAMPLES)):
                file.seek(place)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def sums_json(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """The content of outsize.json for files as they were written, by file name."""
    return {
        "format": SUMS_FORMAT,
        "files": {
            name: {
                "bytes": file.bytes,
                "header_crc32": file.crc32,
                "tensors": {
                    tensor: {"bytes": one.bytes, "crc32": one.crc32}
                    for tensor, one in file.tensors.items()
                },
            }
            for name, file in files.items()
            if file.group is not None
        },
    }


def _why_absent(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} is not a directory"
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{directory} has its weights in a pickle ({pickles[0]}), which can run code when it "
            "is read: convert it to safetensors, e.g. with save_pretrained of transformers"
        )
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory} holds an adapter alone; expected whole weights: outsize merge {directory}"
            " --into NEW writes them"
        )
    return f"{directory} has no weights: expected {SINGLE} or {INDEX}"


def _read_index(path: Path) -> dict[str, str]:
    mapped = read_json(path).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise OutsizeError(f"{path}: no weight_map, expected tensor name -> file name")
    for name, file in mapped.items():
        plain = isinstance(file, str) and file.endswith(".safetensors")
        # the index comes with the download: it may not lead out of its directory
        if not plain or "/" in file or "\\" in file or "\0" in file:
            raise OutsizeError(
                f"{path}: tensor {name!r} is in {file!r}, expected the plain name of a "
                "safetensors file in the same directory"
            )
    return mapped


def _shard(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise OutsizeError(f"{directory}: shard {name} is missing: copy or download it again")
    return path


def _read_sums(directory: Path, headers: Mapping[str, Header]) -> dict[str, dict[str, int]]:
    """The checksums by file and tensor, after those of the headers have been compared."""
    path = directory / SUMS
    value = read_json(path)
    if value.get("format") != SUMS_FORMAT:
        raise OutsizeError(f"{path}: format {value.get('format')!r}, expected {SUMS_FORMAT}")
    sums = {}
    for name, header in headers.items():
        try:
            file = value["files"][name]
            size, checksum = file["bytes"], file["header_crc32"]
            sums[name] = {tensor: int(facts["crc32"]) for tensor, facts in file["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OutsizeError(
                f"{path} does not describe {name}: delete it to load unverified"
            ) from error
        if (size, checksum) != (header.bytes, header.crc32) or set(sums[name]) != set(
            header.entries
        ):
            raise OutsizeError(
                f"{header.path} is not the file that {SUMS} describes: restore it from a copy, or "
                f"delete {SUMS} if it was changed on purpose"
            )
    return sums
