"""Whole documents packed into rows of S tokens: several in a row, none cut, each attends to itself.

Of a document a b c the ids are `a b`, the targets `b c`: its first token is read, never said. The
documents, permuted by the seed, go one by one into the fullest row that still takes them (best fit;
Ding et al., "Fewer truncations improve language modeling", 2024); what is left of a row is a piece
of start tokens without targets. Rows are packed once for all epochs, and permuted in each, so that
an epoch has the same number of rows every time.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outsize.data.batch import IGNORE
from outsize.data.dataset import Dataset
from outsize.data.packing import Row, permutation


@dataclass(frozen=True)
class Whole:
    """documents: by row, those that are in it, in order; rows: (rows,) int64, the row that is i-th
    to be read."""

    documents: tuple[tuple[int, ...], ...]
    rows: NDArray[np.int64]

    def of(self, seed: int, epoch: int) -> Whole:
        """The same rows in the order of an epoch."""
        return replace(self, rows=permutation("rows", seed, epoch, len(self.documents)))

    def read(self, data: Dataset, row: int, sequence: int) -> Row:
        """Row number `row`."""
        ids_S = np.full(sequence, data.start, dtype=np.int64)
        targets_S = np.full(sequence, IGNORE, dtype=np.int64)
        weights_S = None if data.weights_N is None else np.zeros(sequence, dtype=np.float32)
        bounds, filled, width = [0], 0, 0.0
        for document in self.documents[row]:
            stop = int(data.ends[document])
            said = slice(stop - int(data.lengths[document]) + 1, stop)
            here = slice(filled, filled + said.stop - said.start)
            ids_S[here] = data.tokens_N[said.start - 1 : said.stop - 1]
            targets_S[here] = data.tokens_N[said]
            if weights_S is not None and data.weights_N is not None:
                weights_S[here] = data.weights_N[said]
                targets_S[here][weights_S[here] == 0] = IGNORE
            width += _bytes(data, said)
            filled = here.stop
            bounds.append(filled)
        if filled < sequence:
            bounds.append(sequence)
        return Row(ids_S, targets_S, tuple(bounds), width, weights_S)


def pack(data: Dataset, seed: int, sequence: int) -> Whole:
    """Every document of a dataset, in rows of `sequence` tokens; none is longer than a row."""
    sizes = data.lengths - 1
    assert not data.documents or sizes.max() <= sequence, "the source has seen to it"
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left of a row, its number; in order
    for document in permutation("documents", seed, 0, data.documents):
        size = int(sizes[document])
        at = bisect.bisect_left(free, (size, -1))
        left, row = free.pop(at) if at < len(free) else (sequence, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(document))
        if left > size:
            bisect.insort(free, (left - size, row))
    return Whole(tuple(map(tuple, rows)), np.arange(len(rows)))


def _bytes(data: Dataset, said: slice) -> float:
    """What the targets stand for, by their weights."""
    if data.widths_N is None:
        return 0.0
    widths, weights = data.widths_N[said], data.weights_N
    return float(widths.sum() if weights is None else widths @ weights[said])
