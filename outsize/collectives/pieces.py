"""What implementations of `Collective` share: even spans, bytes of an operation, flat views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from outsize.collectives.collective import Operation, Span

# Sums of these are formed in float32 and rounded once.
NARROW = (torch.bfloat16, torch.float16)


class Numbered(Protocol):
    """A group, as far as it is looked at here."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...


def even(numel: int, parts: int) -> tuple[Span, ...]:
    """Spans of parts as equal as they can be, without padding."""
    cuts = [numel * i // parts for i in range(parts + 1)]
    return tuple(pairwise(cuts))


def length(span: Span) -> int:
    """Elements of a span."""
    return span[1] - span[0]


def scattered(spans: Sequence[Span], rank: int) -> int:
    """Elements that a worker receives in a reduce-scatter: its part, from everybody else."""
    return (len(spans) - 1) * length(spans[rank])


def gathered(spans: Sequence[Span], rank: int) -> int:
    """Elements that a worker receives in an all-gather: everybody else's part."""
    return sum(map(length, spans)) - length(spans[rank])


def reduced(numel: int, parts: int, rank: int) -> int:
    """Elements that a worker receives in an all-reduce: 2 (n - 1) / n of them."""
    spans = even(numel, parts)
    return scattered(spans, rank) + gathered(spans, rank)


def outside(given: Sequence[Tensor], rank: int) -> int:
    """Bytes of the tensors but for one's own."""
    return sum(x.nbytes for r, x in enumerate(given) if r != rank)


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as 1-D; where its elements do not lie together, a copy, written back after."""
    if tensor.is_contiguous():
        yield tensor.detach().view(-1)
        return
    packed = tensor.detach().contiguous().view(-1)
    yield packed
    tensor.detach().copy_(packed.view(tensor.shape))


def raw(flat: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: any dtype travels."""
    return flat.detach().reshape(-1).view(torch.uint8)


def agree(
    operation: str, group: Numbered, spans: Sequence[Span], part: Tensor, whole: Tensor
) -> None:
    """Assert that spans, a worker's own part and the whole fit together."""
    rank = group.rank
    assert len(spans) == group.size, f"{operation}: {len(spans)} spans for {group.size} workers"
    assert part.numel() == length(spans[rank]), (
        f"{operation}: a part of {part.numel()} elements for the span {spans[rank]}"
    )
    assert all(0 <= first <= last <= whole.numel() for first, last in spans), (
        f"{operation}: spans {spans} in a tensor of {whole.numel()} elements"
    )


def wider(dtype: torch.dtype) -> torch.dtype:
    """In what sums of a dtype are formed."""
    return torch.float32 if dtype in NARROW else dtype


def joined(total: Tensor, part: Tensor, operation: Operation) -> None:
    """Add a part to the total, or keep what is larger; a NaN stays one."""
    if operation == "max":
        torch.maximum(total, part.to(total.dtype), out=total)
    else:
        total += part
