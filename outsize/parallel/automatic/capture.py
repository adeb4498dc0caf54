"""How somebody else's model calls its blocks: the arguments of first calls, as shapes.

The model runs until the last of the blocks that are asked for begins, no further: for blocks that
are all alike it costs an embedding and a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from outsize.errors import OutsizeError
from outsize.torch_private import tree_map_only

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class _Reached(Exception):
    """All blocks were called."""


def first_calls(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> list[Arguments]:
    """What the model gives each of the blocks when it is called with these: tensors as meta
    tensors. Its buffers stay as they are.

    A model on the meta device is run with one element of memory for each parameter.
    """
    found: dict[nn.Module, Arguments] = {}

    def reached(block: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(block, tree_map_only(Tensor, _shape, (args, kwargs)))
        if len(found) == len(blocks):
            raise _Reached

    hooks = [block.register_forward_pre_hook(reached, with_kwargs=True) for block in blocks]
    try:
        with torch.no_grad(), suppress(_Reached):
            functional_call(model, _shells(model), args, dict(kwargs or {}))
    finally:
        for hook in hooks:
            hook.remove()
    for block in blocks:
        if block not in found:
            raise OutsizeError(
                f"{type(model).__name__} does not call its block {type(block).__name__} with these"
                " arguments; expected a model that runs its blocks: name others by a path pattern"
            )
    return [found[block] for block in blocks]


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _shells(model: nn.Module) -> dict[str, Tensor]:
    """Stand-ins for what is on the meta device, and for buffers, which a block may change."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shells = {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in named
        if tensor.is_meta
    }
    buffers = model.named_buffers()
    return {name: b.clone() for name, b in buffers if not b.is_meta} | shells
