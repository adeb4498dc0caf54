"""An opened checkpoint: nothing of it is handed out that is not what was written, to the bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outsize.checkpoint.files import CODES, Header, file_crc32, read_header, read_tensor
from outsize.checkpoint.manifest import (
    JSON,
    MANIFEST_NAME,
    FileEntry,
    MalformedError,
    Manifest,
    TensorEntry,
    decode,
)
from outsize.errors import OutsizeError

_MAX_MANIFEST = 1 << 29  # bytes; some two million tensors
_VERIFY_THREADS = 8


class DamageError(OutsizeError):
    """A checkpoint that is there but is not what was written; file and tensor are named."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `passed_over` says which later ones were damaged, and how."""

    path: Path
    manifest: Manifest
    headers: Mapping[str, Header]
    places: Mapping[tuple[str, str], str]  # (group, name) -> path of its file
    passed_over: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, JSON]:
        return self.manifest.meta

    def names(self, group: str) -> tuple[str, ...]:
        """The tensors of a group, in the order in which they were saved; none if there is none."""
        return tuple(name for found, name in self.places if found == group)

    def entry(self, group: str, name: str) -> TensorEntry:
        """Shape, dtype and bytes of a tensor. OutsizeError if it is not in the checkpoint."""
        place = self.places.get((group, name))
        if place is None:
            raise OutsizeError(
                f"checkpoint {self.path} has no tensor {name!r} among its {group!r}; expected a "
                "checkpoint of the same model and optimizer"
            )
        return self.manifest.files[place].tensors[name]

    def tensor(self, group: str, name: str, out: Tensor | None = None) -> Tensor:
        """A tensor, read into `out` (same shape; any dtype, device, strides) or newly allocated.

        Its bytes are checked as they pass: DamageError, naming file and tensor, if they are not
        those that were written (`out` is then partly overwritten). OutsizeError if it is absent
        or has another shape.
        """
        entry = self.entry(group, name)
        if out is not None and tuple(out.shape) != entry.shape:
            raise OutsizeError(
                f"tensor {name!r} of {group!r} in checkpoint {self.path} has shape "
                f"{entry.shape}, expected {tuple(out.shape)}: it is of another model"
            )
        try:
            return read_tensor(self.headers[self.places[group, name]], name, out, entry.crc32)
        except OutsizeError as error:
            raise DamageError(str(error)) from error

    def verify(self) -> None:
        """Read every tensor; opening it has read all else. DamageError names the first file and
        tensor that is not as written."""
        with ThreadPoolExecutor(min(_VERIFY_THREADS, os.cpu_count() or 1)) as pool:
            for complaint in pool.map(lambda place: self._complaint(*place), self.places.items()):
                if complaint:
                    pool.shutdown(cancel_futures=True)
                    raise DamageError(complaint)

    def _complaint(self, key: tuple[str, str], place: str) -> str | None:
        header, name = self.headers[place], key[1]
        expected = self.manifest.files[place].tensors[name].crc32
        entry = header.entries[name]
        try:
            found = file_crc32(header.path, entry.start, entry.stop)
        except OSError as error:
            return f"{header.path}: tensor {name!r} cannot be read: {error.strerror}"
        if found == expected:
            return None
        return (
            f"{header.path}: tensor {name!r} is damaged (checksum {found:08x}, expected "
            f"{expected:08x})"
        )


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, None where there is none. DamageError if it is not valid."""
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST)
        return decode(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error.strerror}") from error
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}") from error


def open_contents(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`: its manifest, the presence, sizes and headers of its files and
    the bytes of all that are not tensors are checked here, tensors when they are read.

    DamageError, naming the file, where something is not as it was written.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise DamageError(f"{directory / MANIFEST_NAME} is missing")
    headers: dict[str, Header] = {}
    places: dict[tuple[str, str], str] = {}
    for path, entry in manifest.files.items():
        if entry.group is None:
            _check_file(directory, path, entry)
            continue
        headers[path] = _checked_header(directory / path, entry)
        places |= {(entry.group, name): path for name in entry.tensors}
    return Checkpoint(directory, manifest, headers, places)


def _check_file(directory: Path, path: str, entry: FileEntry) -> None:
    """DamageError unless the whole file is as it was written."""
    full = directory / path
    try:
        size = full.stat().st_size
        if size != entry.bytes:
            raise DamageError(f"{full} is damaged: {size} bytes, expected {entry.bytes}")
        found = file_crc32(full)
    except OSError as error:
        raise DamageError(f"{full} is damaged: {error.strerror}") from error
    if found != entry.crc32:
        raise DamageError(f"{full} is damaged (checksum {found:08x}, expected {entry.crc32:08x})")


def _checked_header(path: Path, entry: FileEntry) -> Header:
    try:
        header = read_header(path)
    except OutsizeError as error:
        raise DamageError(str(error)) from error
    found = {name: (CODES[e.dtype], e.shape) for name, e in header.entries.items()}
    expected = {name: (e.dtype, e.shape) for name, e in entry.tensors.items()}
    if header.bytes != entry.bytes:
        raise DamageError(f"{path} is damaged: {header.bytes} bytes, expected {entry.bytes}")
    if header.crc32 != entry.crc32 or found != expected:
        raise DamageError(f"{path} is damaged: its header is not the one that was written")
    return header
