"""Whole documents packed into rows of S tokens: several in a row, none cut, each attends to itself.

Of a document a b c the ids are `a b`, the targets `b c`: its first token is read, never said. The
documents, permuted by the seed, go one by one into the fullest row that still takes them (best fit;
Ding et al., "Fewer truncations improve language modeling", 2024); what is left of a row is a piece
of start tokens without targets. Rows are packed once for all epochs, and permuted in each, so that
an epoch has the same number of rows every time.

Where documents begin with virtual tokens, a piece of a row begins with these, which are no targets.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.data.batch import IGNORE
from outsize.data.dataset import Dataset
from outsize.data.packing import Row, permutation


@dataclass(frozen=True)
class Whole:
    """documents: by row, those that are in it, in order; rows: (rows,) int64, the row that is i-th
    to be read; virtual: tokens before each document."""

    documents: tuple[tuple[int, ...], ...]
    rows: NDArray[np.int64]
    virtual: int = 0

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
            filled += self.virtual
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


def pack(data: Dataset, seed: int, sequence: int, virtual: int = 0) -> Whole:
    """Every document of a dataset, in rows of `sequence` tokens; none is longer than a row.
    virtual: tokens that stand before each document."""
    sizes = data.lengths - 1 + virtual
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
    return Whole(tuple(map(tuple, rows)), np.arange(len(rows)), virtual)


def in_pieces(data: Dataset, most: int) -> Dataset:
    """Documents that are said from their first token, as whole ones of at most so many targets: a
    piece begins with the token before it, the first one with the start token. In memory."""
    tokens, widths, ends, filled = list[Any](), list[NDArray[np.uint32]](), list[int](), 0
    start = np.array([data.start], dtype=data.tokens_N.dtype)
    for first, last in pairwise(np.append(0, data.ends).tolist()):
        for at in range(first, last, most):
            stop = min(at + most, last)
            tokens += (start if at == first else data.tokens_N[at - 1 : at], data.tokens_N[at:stop])
            if data.widths_N is not None:
                widths += (np.zeros(1, dtype=np.uint32), data.widths_N[at:stop])
            filled += 1 + stop - at
            ends.append(filled)
    return replace(
        data, tokens_N=np.concatenate(tokens or [data.tokens_N]),
        ends=np.array(ends, dtype=np.int64), whole=True,
        widths_N=np.concatenate(widths) if widths else data.widths_N,
    )  # fmt: skip


def _bytes(data: Dataset, said: slice) -> float:
    """What the targets stand for, by their weights."""
    if data.widths_N is None:
        return 0.0
    widths, weights = data.widths_N[said], data.weights_N
    return float(widths.sum() if weights is None else widths @ weights[said])
