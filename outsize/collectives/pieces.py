"""What transports share: flat views, bytes, and how parts of a sum are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outsize import accelerator
from outsize.collectives.collective import (
    AllReduce,
    Call,
    Operation,
    ReduceScatter,
    Span,
    even,
    length,
)

# Sums of these are formed in float32 and rounded once.
NARROW = (torch.bfloat16, torch.float16)
# Bytes of a message of a reduction: few enough for a processor's caches, many for a GPU's launches.
_PIECE, _LAUNCHED = 4 << 20, 64 << 20


def flattened(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """The tensor as 1-D; where its elements do not lie together, a copy. And what writes that back,
    to be called after."""
    flat = tensor.detach().reshape(-1)
    if tensor.is_contiguous():
        return flat, lambda: None
    return flat, lambda: tensor.detach().copy_(flat.view(tensor.shape))


def raw(flat: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: any dtype travels."""
    return flat.detach().reshape(-1).view(torch.uint8)


def wider(dtype: torch.dtype) -> torch.dtype:
    """In what sums of a dtype are formed."""
    return torch.float32 if dtype in NARROW else dtype


def equal(spans: Sequence[Span]) -> bool:
    """Whether spans of one length, which is not 0, lie one behind another in the order of ranks."""
    (first, last), size = spans[0], length(spans[0])
    ends = [(first + i * size, last + i * size) for i in range(len(spans))]
    return size > 0 and list(spans) == ends


def _apart(spans: Sequence[Span]) -> bool:
    """Whether spans of one length do not lie one behind another: a transport would make a copy."""
    return len(set(map(length, spans))) == 1 and not equal(spans)


def added_here(call: Call, size: int) -> tuple[Tensor, Sequence[Span]] | None:
    """What is summed and by whom, of an operation whose parts workers send and add themselves; None
    of those for which an accelerator's transport has an operation of its own."""
    match call:
        case AllReduce(tensor, operation) if operation == "max" or tensor.dtype in NARROW:
            return tensor, even(tensor.numel(), size)
        case ReduceScatter(flat, spans) if flat.dtype in NARROW or _apart(spans):
            return flat, spans
    return None


def at_once(flat: Tensor, spans: Sequence[Span]) -> int:
    """Elements of each worker's part that are sent and added at once."""
    most = _LAUNCHED if accelerator.queues(flat.device) else _PIECE
    return min(most // flat.element_size(), max(1, *map(length, spans)))


def joined(total: Tensor, part: Tensor, operation: Operation) -> None:
    """Add a part to the total, or keep what is larger; a NaN stays one."""
    if operation == "max":
        torch.maximum(total, part.to(total.dtype), out=total)
    else:
        total += part
