"""The gathered input of a branch is let go after the forward pass and gathered again going back.

With sequence parallelism each worker has its tokens of a branch's input; the branch needs all of
them, and what it keeps for the backward pass would hold them all. Here it keeps the own tokens
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
4.2.2), at the price of one more gather a branch. Other tensors that the branch keeps go wherever
they would have gone.

T tokens of the microbatch, t of this worker, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from outsize.collectives import Collective
from outsize.parallel.sums import all_gather, reduce_scatter
from outsize.torch_private import saved_tensor_hooks, storage_key


class Kept:
    """The own tokens x_tD of an input of `total` tokens, and all of them while they are needed."""

    def __init__(self, x_tD: Tensor, axis: Collective, total: int) -> None:
        self.x_tD, self.axis, self.total = x_tD.detach(), axis, total
        self._whole: Tensor | None = None

    def gathered(self) -> Tensor:
        """x_TD, the same tensor until `let_go`."""
        if self._whole is None:
            with torch.no_grad():
                self._whole = all_gather(self.x_tD, self.axis, 0, self.total)
        return self._whole

    def let_go(self) -> None:
        """Nobody needs the whole any more."""
        self._whole = None


class _Fan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, kept: Kept) -> Tensor:
        ctx.kept = kept
        return all_gather(x_tD, kept.axis, 0, kept.total)

    @staticmethod
    def backward(ctx: Any, g_TD: Tensor) -> tuple[Tensor, None]:
        kept: Kept = ctx.kept
        kept.let_go()  # the branch is differentiated by now
        return reduce_scatter(g_TD, kept.axis, 0, kept.total), None


@dataclass(frozen=True)
class _View:
    """A saved tensor that is a view of the gathered one."""

    kept: Kept
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Branch:
    """Runs of a branch: between `enter` and `leave`, what autograd keeps of the gathered input is a
    note of where it comes from."""

    def __init__(self, axis: Collective) -> None:
        self.axis = axis
        self._open: list[saved_tensors_hooks] = []

    def enter(self, x_tD: Tensor, total: int) -> Tensor:
        """x_TD; its gradient is summed and scattered."""
        kept = Kept(x_tD, self.axis, total)
        x_TD: Tensor = _Fan.apply(x_tD, kept)  # type: ignore[no-untyped-call]
        if x_TD.requires_grad:
            hooks = _hooks(kept, storage_key(x_TD))
            hooks.__enter__()
            self._open.append(hooks)
        return x_TD

    def leave(self) -> None:
        """Also when the branch has failed."""
        while self._open:
            self._open.pop().__exit__()


def _hooks(kept: Kept, storage: int) -> saved_tensors_hooks:
    """storage: of the gathered tensor, which lives as long as the hooks are there."""
    outer: Any = saved_tensor_hooks()
    pack, unpack = (_same, _same) if outer is None else outer

    def note(x: Tensor) -> Any:
        if storage_key(x) != storage:
            return pack(x)
        return _View(kept, x.size(), x.stride(), int(x.storage_offset()))

    def found(note: Any) -> Any:
        if not isinstance(note, _View):
            return unpack(note)
        return note.kept.gathered().as_strided(note.size, note.stride, note.offset)

    return saved_tensors_hooks(note, found)


def _same(x: Any) -> Any:
    return x
