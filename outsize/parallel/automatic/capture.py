"""How somebody else's model calls its blocks: the arguments of the first call, as shapes.

The model runs until its first block begins, no further, so it costs an embedding and a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from outsize.errors import OutsizeError
from outsize.torch_private import tree_map_only

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class _Reached(Exception):
    """The block was called."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


def first_call(
    model: nn.Module,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Arguments:
    """What the model gives a block when it is called with these: tensors as meta tensors.

    A model on the meta device is run with one element of memory for each parameter.
    """

    def reached(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Reached((args, kwargs))

    hook = block.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with torch.no_grad():
            functional_call(model, _shells(model), args, dict(kwargs or {}))
    except _Reached as found:
        meta: Arguments = tree_map_only(
            Tensor, lambda t: torch.empty_like(t, device="meta"), found.arguments
        )
        return meta
    finally:
        hook.remove()
    raise OutsizeError(
        f"{type(model).__name__} does not call its block {type(block).__name__} with these"
        " arguments; expected a model that runs its blocks: name others by a path pattern"
    )


def _shells(model: nn.Module) -> dict[str, Tensor]:
    """Stand-ins for what is on the meta device."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in named
        if tensor.is_meta
    }
