"""A tensor as a row of bounded views, so that filling, reading, writing or casting it needs a
temporary of a megabyte or two and never a second tensor of its size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 18  # 0.5 to 2 MB: far above what a call costs, about a core's cache


def pieces(x: Tensor, elements: int = PIECE_ELEMENTS) -> Iterator[Tensor]:
    """Views of at most `elements` elements that cover x, in row-major order; none for an empty x.

    x may have any dtype, device and strides. A view is contiguous wherever x is.
    """
    if x.numel() == 0:
        return
    if x.numel() <= elements:
        yield x
    elif x.is_contiguous():
        yield from torch.split(x.view(-1), elements)
    elif rows := elements // (x.numel() // x.shape[0]):
        yield from torch.split(x, rows)
    else:
        for row in x:
            yield from pieces(row, elements)
