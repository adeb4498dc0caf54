"""What transports share: flat views, bytes, and how parts of a sum are added."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outsize.collectives.collective import Operation

# Sums of these are formed in float32 and rounded once.
NARROW = (torch.bfloat16, torch.float16)


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


def joined(total: Tensor, part: Tensor, operation: Operation) -> None:
    """Add a part to the total, or keep what is larger; a NaN stays one."""
    if operation == "max":
        torch.maximum(total, part.to(total.dtype), out=total)
    else:
        total += part
