"""Documents packed into rows of S tokens, nothing padded and nothing thrown away.

The documents of an epoch are permuted and laid end to end into one stream, which is cut into rows
of S; the rows are permuted too, or the rows of one long document would all meet in one step. A
document that does not fit in what is left of a row goes on in the next one of the stream, as a
piece that attends to itself only. Every token of every document, and its eos, is a target exactly
once an epoch, save the last (N mod S) of the stream, other ones every epoch.

For a document a b c the ids of its row are `start a b c`, the targets `a b c eos`. A piece that
goes on from another row begins with the last token of the piece before it.

Row i of epoch e depends on (data, seed, e, i) and S only. An epoch's layout takes 16 bytes a
document and 8 a row; finding a row in it is a binary search.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outsize.data.batch import IGNORE
from outsize.data.dataset import Dataset


@dataclass(frozen=True)
class Row:
    """ids_S and targets_S (int64), bounds (0, ..., S), the bytes of the targets, by their weights
    (0 where the data has no widths), and the weights (float32), if there are any."""

    ids_S: NDArray[np.int64]
    targets_S: NDArray[np.int64]
    bounds: tuple[int, ...]
    bytes: float
    weights_S: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Layout:
    """Where everything is in the stream of one epoch. `documents`: (documents,) int64, document
    numbers in the order of the stream; `ends`: (documents,) int64, where each ends in the stream;
    `rows`: (rows,) int64, the row of the stream that is i-th to be read."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]

    def read(self, data: Dataset, row: int, sequence: int) -> Row:
        """Row `row` of the stream (not of the reading order). Past the end of the stream the row is
        filled with one piece of start tokens without targets, so that validation loses nothing."""
        ids_S = np.full(sequence, data.start, dtype=np.int64)
        targets_S = np.full(sequence, IGNORE, dtype=np.int64)
        bounds, filled, width = [0], 0, 0
        at = row * sequence
        place = int(np.searchsorted(self.ends, at, side="right"))
        while filled < sequence and place < len(self.documents):
            left = int(self.ends[place]) - at  # tokens of this document not yet read
            take = min(left, sequence - filled)
            document = int(self.documents[place])
            begin = int(data.ends[document]) - left
            piece = data.tokens_N[begin : begin + take]
            targets_S[filled : filled + take] = piece
            ids_S[filled + 1 : filled + take] = piece[:-1]
            if left < data.lengths[document]:  # else the start token stands there already
                ids_S[filled] = data.tokens_N[begin - 1]
            if data.widths_N is not None:
                width += int(data.widths_N[begin : begin + take].sum())
            filled, at, place = filled + take, at + take, place + 1
            bounds.append(filled)
        if filled < sequence:
            bounds.append(sequence)
        return Row(ids_S, targets_S, tuple(bounds), width)


def layout(data: Dataset, seed: int, epoch: int, sequence: int) -> Layout:
    """The layout of an epoch in whole rows of `sequence` tokens."""
    documents = permutation("documents", seed, epoch, data.documents)
    rows = permutation("rows", seed, epoch, data.tokens // sequence)
    return Layout(documents, np.cumsum(data.lengths[documents], dtype=np.int64), rows)


def permutation(purpose: str, seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """A permutation of 0 .. n - 1, (n,) int64, the same on every machine and under any numpy, whose
    own `permutation` may change: only the raw output of Philox ("Parallel random numbers: as easy
    as 1, 2, 3", 2011) and a stable sort are used."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(n)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)
