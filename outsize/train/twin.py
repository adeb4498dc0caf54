"""A module's copy without memory, over which its step is rehearsed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def twin_of(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> tuple[nn.Module, list[tuple[str, nn.Module]]]:
    """A copy of a model whose tensors are made anew, empty, in the mode that is on."""
    known: dict[int, Any] = {}
    for p in model.parameters():
        empty = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        known[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for b in model.buffers():
        known[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    twin = copy.deepcopy(model, known)
    return twin, [(path, twin.get_submodule(path)) for path, _ in blocks]
