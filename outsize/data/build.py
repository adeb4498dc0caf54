"""Documents to tokens on disk: what a source gives, written in order, in two splits."""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from outsize.data.source import Document, Source
from outsize.data.sources import ReadLog
from outsize.data.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # bytes of the files done, bytes in all

_SHOWN = 200  # calls of a Progress, at most


@dataclass(frozen=True)
class Written:
    """What a split came to. `checksums`: crc32 of each file by name; `sizes`: bytes. counts:
    documents of each data path."""

    documents: int
    tokens: int
    bytes: int
    fingerprint: str
    sizes: dict[str, int]
    checksums: dict[str, int]
    counts: list[int]


def build(source: Source, folder: Path, log: ReadLog, progress: Progress) -> dict[str, Written]:
    """Write everything into files under `folder`: "train" and "validation"."""
    tokenizer, kinds = source.given.tokenizer, ("tokens", "ends", *["weights"] * source.weighed)
    train = SplitWriter(folder, "train", tokenizer, kinds)
    validation = SplitWriter(folder, "validation", tokenizer, (*kinds, "widths"))
    total = sum(file.size for file in source.given.files)
    with train, validation:
        shown = 0
        for document in source.documents(log):
            (validation if document.validation else train).add(document)
            if log.done - shown >= total / _SHOWN:
                shown = log.done
                progress(min(shown, total), total)
    progress(total, total)
    return {"train": train.written(), "validation": validation.written()}


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smallest of uint16 and uint32 that holds every id; little-endian on disk."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class SplitWriter:
    """Writes NAME.tokens, NAME.ends and what else there are files of, `kinds` (see Dataset)."""

    def __init__(
        self, folder: Path, name: str, tokenizer: Tokenizer, kinds: tuple[str, ...]
    ) -> None:
        self._folder, self._name, self._kinds = folder, name, kinds
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(self._kinds, 0)
        self._sizes = dict.fromkeys(self._kinds, 0)
        self._hash = hashlib.blake2b(f"{tokenizer.start}".encode(), digest_size=16)
        self._ends = array("q")
        self._tokens = self._bytes = 0
        self._counts: Counter[int] = Counter()

    def add(self, document: Document) -> None:
        content = document.ids.astype(self._dtype).tobytes()
        self._write("tokens", content)
        self._hash.update(content)
        if "widths" in self._kinds:
            assert document.widths is not None and len(document.widths) == len(document.ids)
            self._write("widths", document.widths.astype("<u4").tobytes())
        if "weights" in self._kinds:
            assert document.weights is not None and len(document.weights) == len(document.ids)
            content = document.weights.astype("<f4").tobytes()
            self._write("weights", content)
            self._hash.update(content)
        self._tokens += len(document.ids)
        self._bytes += document.bytes
        self._ends.append(self._tokens)
        self._counts[document.part] += 1

    def written(self) -> Written:
        """What was written; after the writer has been closed."""
        names = {kind: f"{self._name}.{kind}" for kind in self._kinds}
        return Written(
            documents=len(self._ends),
            tokens=self._tokens,
            bytes=self._bytes,
            fingerprint=self._hash.hexdigest(),
            sizes={names[kind]: size for kind, size in self._sizes.items()},
            checksums={names[kind]: crc for kind, crc in self._checksums.items()},
            counts=[self._counts[part] for part in range(max(self._counts, default=-1) + 1)],
        )

    def _write(self, kind: str, content: bytes) -> None:
        self._files[kind].write(content)
        self._checksums[kind] = zlib.crc32(content, self._checksums[kind])
        self._sizes[kind] += len(content)

    def __enter__(self) -> SplitWriter:
        for kind in self._kinds:
            self._files[kind] = (self._folder / f"{self._name}.{kind}").open("xb")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Bring the files to disk; only closed when there was an error."""
        try:
            if error is None:
                ends = np.frombuffer(self._ends, dtype=np.int64).astype("<i8").tobytes()
                self._write("ends", ends)
                self._hash.update(ends)
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for file in self._files.values():
                file.close()
