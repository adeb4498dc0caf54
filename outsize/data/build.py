"""Documents to tokens on disk: read in order by one thread, tokenised by several, written in order.

Reading removes duplicates (by a hash of the content) and splits train from validation. The split
is a function of the content alone: a document whose hash falls in the lowest `fraction` is for
validation, whatever else there is and however the run is seeded. Few text files have too few
documents for that, and give the last `fraction` of each file instead.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from outsize.data.files import SourceFile
from outsize.data.sources import ReadLog, read_documents
from outsize.data.tokenizer import Ids, Tokenizer

Progress = Callable[[int, int], None]  # bytes of the files done, bytes in all

_BATCH_CHARACTERS = 2**20  # of text that one call of the tokenizer gets
_MOST_THREADS = 8


@dataclass(frozen=True)
class Recipe:
    """All that decides the tokens: the files, how they are read and split, the tokenizer."""

    files: tuple[SourceFile, ...]
    field: str
    fraction: float
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Part:
    """A document, or the piece of it that belongs to one split."""

    text: str
    validation: bool


@dataclass(frozen=True)
class Written:
    """What a split came to. `checksums`: crc32 of each file by name; `sizes`: bytes."""

    documents: int
    tokens: int
    bytes: int
    fingerprint: str
    sizes: dict[str, int]
    checksums: dict[str, int]


def build(recipe: Recipe, folder: Path, log: ReadLog, progress: Progress) -> dict[str, Written]:
    """Tokenise everything into files under `folder`: "train" and "validation"."""
    train = SplitWriter(folder, "train", recipe.tokenizer, measured=False)
    validation = SplitWriter(folder, "validation", recipe.tokenizer, measured=True)
    total = sum(file.size for file in recipe.files)
    with train, validation:
        for parts, encoded in _in_parallel(recipe.tokenizer, _batches(read_parts(recipe, log))):
            for part, (ids, widths) in zip(parts, encoded, strict=True):
                writer = validation if part.validation else train
                if ids.size:
                    writer.add(ids, widths, len(part.text.encode()))
                else:
                    log.empty += 1
            progress(min(log.done, total), total)
    progress(total, total)
    return {"train": train.written(), "validation": validation.written()}


def read_parts(recipe: Recipe, log: ReadLog) -> Iterator[Part]:
    """The documents of all files in order, each text once, given to train or validation."""
    files, fraction = recipe.files, recipe.fraction
    few = all(file.kind == "text" for file in files) and len(files) * fraction < 2
    seen: set[bytes] = set()
    for file in files:
        for text in read_documents(file, recipe.field, log):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in seen:
                log.duplicates += 1
                continue
            seen.add(digest)
            if few:
                yield from _tail_held_out(text, fraction)
            else:
                yield Part(text, int.from_bytes(digest[:8], "little") < fraction * 2**64)


def _tail_held_out(text: str, fraction: float) -> Iterator[Part]:
    """Cut near the wanted place: after a line if one ends in the tail, else where it falls."""
    cut = len(text) - math.floor(len(text) * fraction)
    cut = text.find("\n", cut - 1) + 1 or cut
    for piece, validation in ((text[:cut], False), (text[cut:], True)):
        if piece:
            yield Part(piece, validation)


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


Encoded = list[tuple[Ids, Ids | None]]


def _in_parallel(
    tokenizer: Tokenizer, batches: Iterator[list[Part]]
) -> Iterator[tuple[list[Part], Encoded]]:
    """Encode batches in threads (tokenizers work off the interpreter lock), give them in order."""
    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    waiting: deque[tuple[list[Part], Future[Encoded]]] = deque()
    pool = ThreadPoolExecutor(threads, "outsize-tokenise")
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode, tokenizer, batch)))
            if len(waiting) > 2 * threads:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode(tokenizer: Tokenizer, batch: Sequence[Part]) -> Encoded:
    plain = iter(tokenizer.encode_many([part.text for part in batch if not part.validation]))
    return [
        tokenizer.encode_measured(part.text) if part.validation else (next(plain), None)
        for part in batch
    ]


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smallest of uint16 and uint32 that holds every id; little-endian on disk."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class SplitWriter:
    """Writes NAME.tokens, NAME.ends and, when `measured`, NAME.widths (see Dataset)."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, measured: bool) -> None:
        self._folder, self._name = folder, name
        self._eos = tokenizer.eos
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._kinds = ("tokens", "ends", "widths") if measured else ("tokens", "ends")
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(self._kinds, 0)
        self._sizes = dict.fromkeys(self._kinds, 0)
        self._hash = hashlib.blake2b(f"{tokenizer.start}".encode(), digest_size=16)
        self._ends = array("q")
        self._tokens = self._bytes = 0

    def add(self, ids: Ids, widths: Ids | None, size: int) -> None:
        """A document of `size` bytes; eos is added here."""
        content = np.append(ids, np.uint32(self._eos)).astype(self._dtype).tobytes()
        self._write("tokens", content)
        self._hash.update(content)
        if "widths" in self._kinds:
            assert widths is not None and len(widths) == len(ids)
            self._write("widths", np.append(widths, np.uint32(0)).astype("<u4").tobytes())
        self._tokens += len(ids) + 1
        self._bytes += size
        self._ends.append(self._tokens)

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
