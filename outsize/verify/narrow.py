"""Modules that compute in fewer bits inside than they are given: no proof in float64 sees through.

Many norms and attentions cast to float32 whatever their input is. What they sum then rounds at
6e-8, so that two exact orders of one sum differ by far more than float64 allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outsize.torch_private import TorchDispatchMode, tree_leaves

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def narrow_modules(model: nn.Module, work: Callable[[], object]) -> tuple[str, ...]:
    """Names of the innermost modules whose operators give fewer bits than float64 in `work`, which
    runs a model that has and is given float64."""
    inside: list[str] = []
    seen = _Seen(inside)
    hooks: list[RemovableHandle] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(_enter, inside, name)))
        hooks.append(module.register_forward_hook(partial(_leave, inside), always_call=True))
    try:
        with seen, torch.no_grad():
            work()
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(seen.found)


def _enter(inside: list[str], name: str, module: nn.Module, given: Any) -> None:
    inside.append(name or type(module).__name__)


def _leave(inside: list[str], module: nn.Module, given: Any, out: Any) -> None:
    inside.pop()


class _Seen(TorchDispatchMode):
    """Books the module at work where an operator gives few bits."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = inside
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        few = (x.dtype in NARROW for x in tree_leaves(out) if isinstance(x, Tensor))
        if self.inside and any(few):
            self.found.setdefault(self.inside[-1])
        return out
