"""Order from a counter-based generator: a permutation is a function of (purpose, seed, epoch, n).

Only the raw 64-bit output of Philox ("Parallel random numbers: as easy as 1, 2, 3", 2011) and a
stable sort are used. Both are fixed for good, unlike numpy's own `permutation`, whose method may
change between releases: a run resumed under another numpy sees the same order.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(purpose: str, seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """A permutation of 0 .. n - 1, (n,) int64, the same on every machine."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(n)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)
