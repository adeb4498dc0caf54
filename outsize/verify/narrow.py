"""Modules that compute in fewer bits inside than they are given: no proof in float64 sees through.

Many norms and attentions cast to float32 whatever their input is. What they sum then rounds at
6e-8, so that two exact orders of one sum differ by far more than float64 allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from outsize.torch_private import DispatchMode, tree_leaves

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def narrow_modules(model: nn.Module, work: Callable[[], object]) -> tuple[str, ...]:
    """Names of the innermost modules whose operators give fewer bits than float64 in `work`, which
    runs a model that has and is given float64."""
    with ModuleTracker() as tracker, _Seen(tracker) as seen, torch.no_grad():
        work()
    return tuple(name.removeprefix(f"{type(model).__name__}.") for name in seen.found)


class _Seen(DispatchMode):
    """Books the module at work where an operator gives few bits."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inside = self.tracker.parents - {"Global"}
        if inside and any(x.dtype in NARROW for x in tree_leaves(out) if isinstance(x, Tensor)):
            self.found.setdefault(max(inside, key=len))  # each holds the names of those around it
        return out
