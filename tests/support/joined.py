"""A tensor from the parts of all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outsize.parallel.layouts import Layout, Partial, Replicated, spans


def joined(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """The whole tensor from the parts of all workers, in their order."""
    if isinstance(layout, Partial):
        return torch.stack(list(parts)).sum(0)
    if isinstance(layout, Replicated):
        return parts[0]
    n, dim = len(parts), layout.dim
    length = sum(part.shape[dim] for part in parts[:: layout.copies])
    whole = parts[0].new_empty([length if i == dim else s for i, s in enumerate(parts[0].shape)])
    for rank, part in enumerate(parts):
        at = 0
        for first, last in spans(length, layout, n, rank):
            whole.narrow(dim, first, last - first).copy_(part.narrow(dim, at, last - first))
            at += last - first
    return whole
