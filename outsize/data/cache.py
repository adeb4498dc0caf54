"""The cache of tokenised data: built once, then mapped, whoever comes first.

An entry is a directory named by a hash of all that decides its content: the files (path, size,
and their content where that is at most HASHED_BYTES in all, else their time of change), how they
are read and split, the tokenizer and VERSION. It is written under a temporary name, synced and
renamed. Several processes may build the same entry at once: the first rename stands, and since
each would have written the same bytes the others take that one. An entry that is damaged is put
aside and built anew. Nothing in it is executed or unpickled: flat arrays and a JSON manifest.

Everything is tokenised before training begins. Training on what is there so far would make the
order depend on how fast tokenising is; here it depends on (seed, sample) only. Bytes take about a
second for 30 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.checkpoint.files import file_crc32
from outsize.checkpoint.writing import remove, sync_directory
from outsize.data.build import Progress, Written, build, token_dtype
from outsize.data.dataset import Dataset
from outsize.data.files import SourceFile
from outsize.data.source import Source
from outsize.data.sources import ReadLog, Skip
from outsize.errors import OutsizeError, counted

VERSION = 3  # of the files and of what is in them; an entry of another version is never read
HASHED_BYTES = 64 * 2**20  # up to here files are known by content: reading takes a moment
CHECKED_BYTES = 2**30  # up to here an entry's checksums are verified when it is opened
STALE_SECONDS = 24 * 3600  # a temporary directory this old belongs to a process that was killed

Opened = tuple[Dataset, Dataset, ReadLog]


def open_cached(source: Source, cache: Path, progress: Progress) -> Opened:
    """Train and validation data of a source, from the cache or built into it. OutsizeError when
    the cache directory cannot be written or is full."""
    entry = cache / key(source)
    opened = _open(entry, source)
    if opened is None:
        try:
            opened = _build(source, entry, progress)
        except OSError as error:
            raise OutsizeError(
                f"data cache {cache} cannot be written ({error.strerror or error}): "
                "free some space there or set data.cache to another directory"
            ) from error
    return opened


def key(source: Source) -> str:
    """The name of the entry."""
    files = source.given.files
    content = sum(file.size for file in files) <= HASHED_BYTES
    identity = {
        "version": VERSION,
        "files": [_identity(file, content) for file in files],
        **source.identity(),
        "tokenizer": source.given.tokenizer.fingerprint(),
    }
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=12).hexdigest()


def _identity(file: SourceFile, content: bool) -> tuple[str | int, ...]:
    state: int | str = file.mtime
    if content:
        try:
            state = hashlib.blake2b(file.path.read_bytes(), digest_size=16).hexdigest()
        except OSError:  # reading will skip and report it
            state = "unreadable"
    path = os.path.abspath(file.path)
    return path, file.kind, file.named, file.size, state, file.packed, file.part


def _build(source: Source, entry: Path, progress: Progress) -> Opened:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _sweep(entry.parent)
    folder = entry.parent / f".{entry.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        log = ReadLog(ignored=source.given.ignored)
        written = build(source, folder, log, progress)
        _refuse_empty(source, written, log)
        _write_manifest(folder, written, log)
        _publish(folder, entry, source)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    opened = _open(entry, source)
    if opened is None:
        raise OutsizeError(f"data cache {entry} is damaged just after writing: check the disk")
    return opened


def _publish(folder: Path, entry: Path, source: Source) -> None:
    """Give `folder` its final name, unless a sound entry has it: then that one stays."""
    while True:
        try:
            os.rename(folder, entry)
        except OSError:
            if not entry.exists():
                raise
            if _open(entry, source) is not None:
                return
            # Damaged: put aside in one step, so that nobody sees half of it. If another process
            # was faster, the next round meets what it put there.
            aside = entry.parent / f".{entry.name}.{uuid.uuid4().hex}"
            try:
                os.rename(entry, aside)
            except FileNotFoundError:
                continue
            remove(aside)
        else:
            sync_directory(entry.parent)
            return


def _write_manifest(folder: Path, written: dict[str, Written], log: ReadLog) -> None:
    splits = {name: asdict(split) for name, split in written.items()}
    manifest = {"version": VERSION, "splits": splits, "report": asdict(log)}
    text = json.dumps(manifest)
    checksum = zlib.crc32(text.encode())
    with (folder / "manifest.json").open("x") as file:
        file.write(json.dumps({"checksum": checksum, "manifest": text}))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder)


def _open(entry: Path, source: Source) -> Opened | None:
    """The entry's data, None when there is no sound entry."""
    try:
        outer = json.loads((entry / "manifest.json").read_bytes())
        if zlib.crc32(outer["manifest"].encode()) != outer["checksum"]:
            return None
        manifest = json.loads(outer["manifest"])
        train, validation = (
            _map(entry, name, manifest["splits"][name], source) for name in ("train", "validation")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    found = manifest["report"]
    skips = [Skip(**skip) for skip in found.pop("skips")]
    return train, validation, ReadLog(skips, **found)


def _map(entry: Path, name: str, split: dict[str, Any], source: Source) -> Dataset:
    """One split, its files mapped. Raises ValueError or OSError when a file is not as it was."""
    for file, size in split["sizes"].items():
        path = entry / file
        if path.stat().st_size != size:
            raise ValueError(f"{path}: size")

        checked = sum(split["sizes"].values()) <= CHECKED_BYTES
        if checked and file_crc32(path) != split["checksums"][file]:
            raise ValueError(f"{path}: checksum")

    def array(kind: str, dtype: str) -> NDArray[Any] | None:
        file = f"{name}.{kind}"
        return _array(entry / file, np.dtype(dtype)) if file in split["sizes"] else None

    return Dataset(
        tokens_N=_array(entry / f"{name}.tokens", token_dtype(source.given.tokenizer.vocab_size)),
        ends=_array(entry / f"{name}.ends", np.dtype("<i8")),
        widths_N=array("widths", "<u4"),
        start=source.given.tokenizer.start,
        bytes=split["bytes"],
        fingerprint=split["fingerprint"],
        weights_N=array("weights", "<f4"),
        whole=source.whole,
        counts=tuple(split["counts"]),
    )


def _array(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _refuse_empty(source: Source, written: dict[str, Written], log: ReadLog) -> None:
    wanted = "validation" if source.given.fraction == 1 else "train"
    if written[wanted].documents:
        return
    first, more = source.given.files[0].path, len(source.given.files) - 1
    paths = f"{first} and {more} more" if more else f"{first}"
    if written["validation"].documents and wanted == "train":
        raise OutsizeError(
            f"data in {paths}: validation takes all of it,"
            f" {counted(written['validation'].documents, 'document')}; give more documents, or set"
            " data.validation to 0"
        )
    if log.long:
        raise OutsizeError(
            f"data in {paths}: nothing is left to train on, since no target is in the first tokens"
            f" that a row has; {log.summary()}; raise train.sequence"
        )
    raise OutsizeError(
        f"data in {paths} is empty: expected at least one document of text; {log.summary()}"
    )


def _sweep(cache: Path) -> None:
    """Remove what killed processes have left."""
    for folder in cache.glob(".*.*"):
        try:
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                remove(folder)
        except FileNotFoundError:
            continue
