"""Datasets in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from outsize.data import Dataset


def dataset_of(
    documents: Sequence[Sequence[int]],
    eos: int,
    start: int | None = None,
    widths: Sequence[Sequence[int]] | None = None,
) -> Dataset:
    """A Dataset in memory from token ids (without eos, which is added); start is eos if not given.

    `widths` gives the bytes of each token; without it the bytes are unknown (0).
    """
    flat = [np.asarray([*document, eos], dtype=np.uint32) for document in documents]
    tokens_N = np.concatenate(flat) if flat else np.empty(0, np.uint32)
    ends = np.cumsum([len(document) for document in flat], dtype=np.int64)
    widths_N = None
    if widths is not None:
        widths_N = np.asarray([w for own in widths for w in (*own, 0)], dtype=np.uint32)
        assert len(widths_N) == len(tokens_N)
    first = eos if start is None else start
    content = f"{first}".encode() + tokens_N.tobytes() + ends.tobytes()
    return Dataset(
        tokens_N=tokens_N,
        ends=ends,
        widths_N=widths_N,
        start=first,
        bytes=0 if widths_N is None else int(widths_N.sum()),
        fingerprint=hashlib.blake2b(content, digest_size=16).hexdigest(),
    )
