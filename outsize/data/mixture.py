"""Rows of several files in given shares, in an order that depends on seed and sample alone.

Samples are in blocks. In each, the places that a part has are drawn by stratified sampling: the
block's places, permuted, are spread evenly over the shares laid end to end, from an offset that is
drawn for the block. So a part has its share of every block, but for less than two rows of it, and
exactly its share on average. Which row of a part a sample has is how many the part had before.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from outsize.data.packing import permutation

BLOCK = 1024  # samples
_KEPT = 4  # blocks


class Mixture:
    """shares: of each part, above 0, in any unit."""

    def __init__(self, shares: tuple[float, ...], seed: int) -> None:
        self._seed = seed
        self._edges = np.cumsum(np.array(shares) / sum(shares))[:-1]  # (parts - 1,)
        self._block = functools.lru_cache(_KEPT)(self._drawn)

    def place(self, sample: int) -> tuple[int, int]:
        """The part of a sample, and how many samples before it are of that part."""
        block, at = divmod(sample, BLOCK)
        parts_N, before_N = self._block(block)
        return int(parts_N[at]), int(before_N[at])

    def _drawn(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each sample of a block its part, and how many before it are of that part."""
        edges = self._ends(block + 1)
        order_N = permutation("mixture", self._seed, block, BLOCK)
        parts_N = np.searchsorted(edges[-1], order_N, side="right").astype(np.int64)
        ends = np.concatenate((np.zeros((block + 1, 1)), edges, np.full((block + 1, 1), BLOCK)), 1)
        counts = np.diff(ends, axis=1)[:-1].sum(0).astype(np.int64)  # (parts,) in earlier blocks
        before_N = np.empty(BLOCK, dtype=np.int64)
        for part, count in enumerate(counts.tolist()):
            here = parts_N == part
            before_N[here] = count + np.arange(here.sum())
        return parts_N, before_N

    def _ends(self, blocks: int) -> NDArray[np.float64]:
        """(blocks, parts - 1): which of a block's places are each part's: those below it."""
        digest = hashlib.blake2b(f"mixture/{self._seed}".encode(), digest_size=16).digest()
        raw = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(blocks)
        offsets = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found: NDArray[np.float64] = np.ceil(self._edges * BLOCK - offsets[:, None])
        return np.clip(found, 0, BLOCK)
