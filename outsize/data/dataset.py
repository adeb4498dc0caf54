"""A Dataset: tokenised documents in flat arrays, in memory or mapped from a cache file.

The documents are stored as what a model learns to say: the tokens of each, then its eos. What the
model reads (each document shifted by one, behind a start token) follows from that.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    tokens_N: Tokens
    ends: NDArray[np.int64]
    widths_N: NDArray[np.uint32] | None
    start: int
    bytes: int
    fingerprint: str
    weights_N: NDArray[np.float32] | None = None
    whole: bool = False

    @property
    def documents(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        """All tokens, eos of every document included."""
        return len(self.tokens_N)

    @cached_property
    def targets(self) -> int:
        """The tokens that an epoch has as targets."""
        return self.tokens if self.weights_N is None else int(np.count_nonzero(self.weights_N))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(documents,) int64: tokens of each document with its eos."""
        return np.diff(self.ends, prepend=0)
