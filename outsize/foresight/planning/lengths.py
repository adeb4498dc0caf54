"""A histogram of documents' lengths: what of a row they fill, and what a token of one meets.

Documents are whole, as chats are: rows are packed by the rule that a run packs them by
(outsize/data/whole.py). Attention ends where a document does, so that tokens meet documents of the
mean length of those that they are in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from outsize.data.dataset import Dataset

DRAWN = 4096  # documents that are packed


@dataclass(frozen=True)
class Lengths:
    """seen: tokens of the document that a token is in, in the mean, 0: the row; filled: the part
    of rows that documents fill."""

    seen: int
    filled: float


WHOLE = Lengths(0, 1.0)  # rows, where nothing is said


def lengths(text: str, sequence: int) -> Lengths:
    """Of "LENGTH:SHARE,..." (shares of documents, in any unit), or of one length, in rows of so
    many tokens. OutsizeError for what is none of these, and for documents longer than a row."""
    from outsize.data.whole import pack

    parts = [one.partition(":") for one in text.split(",")]
    try:
        each = np.array([int(length) for length, _, _ in parts], dtype=np.int64)
        shares = np.array([float(share) if sign else 1.0 for _, sign, share in parts])
    except (ValueError, OverflowError):
        each, shares = np.zeros(0, dtype=np.int64), np.zeros(0)
    if not len(each) or each.min() < 1 or not (np.isfinite(shares) & (shares > 0)).all():
        raise OutsizeError(
            f"--lengths is {text!r}; expected tokens of documents and how many have them, as"
            " 512:70,2048:25,4096:5, or one length"
        )
    if each.max() > sequence:
        raise OutsizeError(
            f"--lengths has documents of {each.max()} tokens, and a row has {sequence}; expected"
            f" {sequence} at most, or --set train.sequence={each.max()}"
        )
    counts = np.maximum(1, np.round(shares / shares.sum() * DRAWN)).astype(np.int64)
    sizes = np.repeat(each, counts)
    found = float(sizes.sum())
    rows = len(pack(_documents(sizes), 0, sequence).documents)
    return Lengths(max(1, round(float((sizes**2).sum()) / found)), found / (rows * sequence))


def _documents(sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Dataset:
    """Documents of so many targets each; the first token is read, never said."""
    from outsize.data.dataset import Dataset

    return Dataset(np.zeros(0, dtype=np.uint16), np.cumsum(sizes + 1), None, 0, 0, "", whole=True)
