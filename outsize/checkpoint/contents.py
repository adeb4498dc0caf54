"""Writing what lies in one checkpoint's directory, each byte once.

Tensors come in groups. "weights" is laid out as Hugging Face does (model.safetensors, or shards and
their index), so that the directory is a model's directory too; any other group g is g.safetensors,
or shards of it. The manifest comes last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from outsize.checkpoint.files import CODES, file_crc32
from outsize.checkpoint.manifest import (
    JSON,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    encode,
)
from outsize.checkpoint.writing import Later, sync_directory, write_json, write_tensors
from outsize.errors import OutsizeError
from outsize.models.names import Stored

WEIGHTS = "weights"
_WEIGHTS_STEM = "model"  # Hugging Face's name for the files of the weights


Named = tuple[str, str, Tensor | Later]  # group, name, tensor


def merged(
    stored: Iterable[Stored], like: Callable[[str], Tensor], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Later]]:
    """The stored tensors by name, each made when it is written. like: a native parameter without
    its values; read: with them."""
    for entry in stored:
        made = _Merged(entry, read)
        for index, one in enumerate(entry.merge(tuple(like(name) for name in entry.ours))):
            yield entry.theirs[index], Later(one.dtype, tuple(one.shape), partial(made.take, index))


@dataclass
class _Merged:
    """The stored tensors of one entry, merged when the first is asked for, each given once."""

    entry: Stored
    read: Callable[[str], Tensor]
    left: dict[int, Tensor] = field(default_factory=dict)

    def take(self, index: int) -> Tensor:
        if index not in self.left:
            ours = tuple(self.read(name) for name in self.entry.ours)
            self.left.update(enumerate(self.entry.merge(ours)))
        return self.left.pop(index)


def write_contents(
    directory: Path,
    step: int,
    tensors: Iterable[Named],
    meta: Mapping[str, JSON],
    files: Callable[[Path], None] | None,
    shard_bytes: int,
) -> None:
    """Fill the empty `directory`, its manifest last, and sync it all.

    Tensors are taken one at a time and let go shard by shard; those that are made later are there
    one at a time, and made in the order in which they came where a group follows another: what
    lies in parts on several workers, all of them ask for in one order. OSError, or OutsizeError
    caused by one, where the system refuses.
    """
    if files is not None:
        files(directory)
    entries = {path: _sync_and_describe(directory / path) for path in _plain_files(directory)}
    entries |= write_groups(directory, tensors, shard_bytes)
    write_synced(directory / MANIFEST_NAME, encode(Manifest(step, meta, entries)))
    for inner in (path for path in directory.rglob("*") if path.is_dir()):
        sync_directory(inner)
    sync_directory(directory)


def write_groups(
    directory: Path, tensors: Iterable[Named], shard_bytes: int
) -> dict[str, FileEntry]:
    """The files of all tensors' groups, each of at most so many bytes, or of one tensor; by path.
    Memory as of `write_contents`."""
    shards = _Shards(directory, shard_bytes)
    for group, name, tensor in tensors:
        shards.add(group, name, tensor)
    return shards.finish()


def write_synced(path: Path, data: bytes) -> None:
    """Make the file `path` of `data`, on disk when this returns. OSError, also if it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain_files(directory: Path) -> list[str]:
    found = [path for path in sorted(directory.rglob("*")) if not path.is_dir()]
    assert not any(path.is_symlink() for path in found), "a link would not be kept with it"
    return [path.relative_to(directory).as_posix() for path in found]


def _sync_and_describe(path: Path) -> FileEntry:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return FileEntry(size, file_crc32(path), None, {})


@dataclass
class _Shards:
    """Collects each group's tensors and writes them out, a file whenever there is enough for one.

    How many files a group has is known at its end only: they get their last names then.
    """

    directory: Path
    shard_bytes: int
    waiting: dict[str, dict[str, Tensor | Later]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes waiting
    written: dict[str, list[FileEntry]] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, group: str, name: str, tensor: Tensor | Later) -> None:
        assert group.isidentifier() and group != _WEIGHTS_STEM, f"{group!r} cannot name files"
        assert (group, name) not in self.seen, f"{name!r} comes twice in {group!r}"
        if tensor.dtype not in CODES:
            raise OutsizeError(
                f"tensor {name!r} of {group!r} has dtype {tensor.dtype}, which safetensors does "
                f"not have; expected one of {', '.join(map(str, CODES))}"
            )
        self.seen.add((group, name))
        size = self.sizes.get(group, 0)
        if size and size + tensor.nbytes > self.shard_bytes:
            self._make()
            if self.waiting[group]:
                self._write(group)
        self.waiting.setdefault(group, {})[name] = tensor
        self.sizes[group] = self.sizes.get(group, 0) + tensor.nbytes

    def finish(self) -> dict[str, FileEntry]:
        for group in [group for group, waiting in self.waiting.items() if waiting]:
            self._write(group)
        entries: dict[str, FileEntry] = {}
        for group, shards in self.written.items():
            named = {_name(group, i, len(shards)): entry for i, entry in enumerate(shards)}
            for index, name in enumerate(named):
                os.rename(self.directory / _part(group, index), self.directory / name)
            entries |= named
            if group == WEIGHTS and len(shards) > 1:
                index_name = f"{_WEIGHTS_STEM}.safetensors.index.json"
                write_json(self.directory / index_name, _index(named))
                entries[index_name] = _sync_and_describe(self.directory / index_name)
        return entries

    def _make(self) -> None:
        """Write what is made later: that of other groups came before."""
        for group, waiting in self.waiting.items():
            if any(isinstance(tensor, Later) for tensor in waiting.values()):
                self._write(group)

    def _write(self, group: str) -> None:
        waiting = self.waiting[group]
        self.waiting[group], self.sizes[group] = {}, 0
        shards = self.written.setdefault(group, [])
        shards.append(write_tensors(self.directory / _part(group, len(shards)), group, waiting))


def _part(group: str, index: int) -> str:
    return f".{group}-{index}.part"


def _name(group: str, index: int, count: int) -> str:
    stem = _WEIGHTS_STEM if group == WEIGHTS else group
    return (
        f"{stem}.safetensors"
        if count == 1
        else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
    )


def _index(shards: Mapping[str, FileEntry]) -> dict[str, object]:
    total = sum(tensor.bytes for entry in shards.values() for tensor in entry.tensors.values())
    where = {name: path for path, entry in shards.items() for name in entry.tensors}
    return {"metadata": {"total_size": total}, "weight_map": where}
