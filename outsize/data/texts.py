"""Plain text as a source: read in order by one thread, tokenised by several.

Reading removes duplicates (by a hash of the content) and splits train from validation. The split
is a function of the content alone: a document whose hash falls in the lowest `fraction` is for
validation, whatever else there is and however the run is seeded. Few text files have too few
documents for that, and give the last `fraction` of each file instead.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.data.source import Document, Given, held_out
from outsize.data.sources import ReadLog, read_documents
from outsize.data.tokenizer import Ids, Tokenizer

_BATCH_CHARACTERS = 2**20  # of text that one call of the tokenizer gets
_MOST_THREADS = 8


@dataclass(frozen=True)
class Part:
    """A document, or the piece of it that belongs to one split."""

    text: str
    validation: bool
    part: int


@dataclass(frozen=True)
class TextSource:
    """Documents of text; every token is a target, and what ends each."""

    given: Given
    whole = False
    weighed = False

    def identity(self) -> Mapping[str, Any]:
        return {"field": self.given.field, "fraction": self.given.fraction}

    def documents(self, log: ReadLog) -> Iterator[Document]:
        tokenizer = self.given.tokenizer
        for parts, encoded in _in_parallel(tokenizer, _batches(read_parts(self.given, log))):
            for part, (ids, widths) in zip(parts, encoded, strict=True):
                if not ids.size:
                    log.empty += 1
                    continue
                ended = np.append(ids, np.uint32(tokenizer.eos))
                wide = None if widths is None else np.append(widths, np.uint32(0))
                size = len(part.text.encode())
                yield Document(ended, part.validation, size, widths=wide, part=part.part)


def read_parts(given: Given, log: ReadLog) -> Iterator[Part]:
    """The documents of all files in order, each text once, given to train or validation."""
    files, fraction = given.files, given.fraction
    few = all(file.kind == "text" for file in files) and len(files) * fraction < 2 and fraction < 1
    seen: set[bytes] = set()
    for file in files:
        for text in read_documents(file, given.field, log):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in seen:
                log.duplicates += 1
                continue
            seen.add(digest)
            if few:
                yield from _tail_held_out(text, fraction, file.part)
            else:
                yield Part(text, held_out(digest, fraction), file.part)


def _tail_held_out(text: str, fraction: float, part: int) -> Iterator[Part]:
    """Cut near the wanted place: after a line if one ends in the tail, else where it falls."""
    cut = len(text) - math.floor(len(text) * fraction)
    cut = text.find("\n", cut - 1) + 1 or cut
    for piece, validation in ((text[:cut], False), (text[cut:], True)):
        if piece:
            yield Part(piece, validation, part)


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
    placed = [tokenizer.encode_placed(part.text) if part.validation else None for part in batch]
    return [(next(plain), None) if one is None else (one.ids, one.widths) for one in placed]
