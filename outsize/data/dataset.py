"""A Dataset: tokenised documents in flat arrays, in memory or mapped from a cache file.

The documents are stored as what a model learns to say: the tokens of each, then its eos. What the
model reads (each document shifted by one, behind a start token) follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Dataset:
    """N tokens in all, of `documents` documents.

    tokens_N: uint16 or uint32; ends: (documents,) int64, where each document ends in tokens_N,
    its eos included; widths_N: uint32, the UTF-8 bytes that each token stands for (0 for eos),
    kept for validation data only; bytes: of all the text; fingerprint: a hash of tokens, ends and
    weights. weights_N: float32, what the loss of saying each token is times, None for 1. whole: no
    document is cut over rows, and its first token is read, not said (outsize/data/whole.py).
    counts: documents of each data path, in order. shares: of the rows, that each path's documents
    have (outsize/data/mixture.py); empty where all documents are one lot.
    """

    tokens_N: Tokens
    ends: NDArray[np.int64]
    widths_N: NDArray[np.uint32] | None
    start: int
    bytes: int
    fingerprint: str
    weights_N: NDArray[np.float32] | None = None
    whole: bool = False
    counts: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def documents(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        """All tokens, eos of every document included."""
        return len(self.tokens_N)

    def parts(self) -> Iterator[Dataset]:
        """The documents of each data path by themselves; views of the same arrays."""
        edges = np.append(0, self.ends)
        first = 0
        for count in self.counts:
            start, stop = int(edges[first]), int(edges[first + count])
            here = slice(start, stop)
            ends = self.ends[first : first + count] - start
            yield replace(
                self, tokens_N=self.tokens_N[here], ends=ends, counts=(count,), shares=(),
                widths_N=None if self.widths_N is None else self.widths_N[here],
                weights_N=None if self.weights_N is None else self.weights_N[here],
            )  # fmt: skip
            first += count

    @cached_property
    def targets(self) -> int:
        """The tokens that an epoch has as targets."""
        return self.tokens if self.weights_N is None else int(np.count_nonzero(self.weights_N))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(documents,) int64: tokens of each document with its eos."""
        return np.diff(self.ends, prepend=0)
