"""Upload: tensors that a batch has in host memory, on their way to a device that has its own.

The calling thread makes room on the device, a lane's thread copies. The bytes pass through
pinned memory, which is what lets a copy run beside the computation.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize import accelerator
from outsize.torch_private import tree_map

Pairs = list[tuple[Tensor, Tensor]]  # room on the device, what comes there


def comes(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor of a batch must be copied to a device. One that somebody has put into the
    device's own memory is there."""
    return tensor.device != device or not accelerator.apart(device)


def room_for(part: Any, device: torch.device) -> tuple[Any, Pairs]:
    """A microbatch whose tensors are room on a device without values, and what comes there.
    part: tensors in lists, tuples, dicts and dataclasses; whatever else is in it stays as it is."""
    pairs: Pairs = []
    return tree_map(partial(_room, device, pairs), part), pairs


def _room(device: torch.device, pairs: Pairs, item: Any) -> Any:
    if isinstance(item, Tensor) and comes(item, device):
        pairs.append((torch.empty_like(item, device=device, requires_grad=False), item))
        return pairs[-1][0]
    if is_dataclass(item) and not isinstance(item, type):
        each = {f.name: getattr(item, f.name) for f in fields(item)}
        return replace(item, **tree_map(partial(_room, device, pairs), each))
    return item


def upload(pairs: Pairs) -> None:
    """Have what comes in its room, on the calling thread's stream. Memory that is not pinned is
    pinned first, here and not where the computation is handed out."""
    for room, tensor in pairs:
        source = accelerator.pin(tensor) if accelerator.queues(room.device) else tensor
        room.copy_(source, non_blocking=True)
