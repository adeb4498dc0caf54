"""A block's call, cut out of the graph around it.

A tensor that enters is cut at its first use, once, however many blocks read it; gradients add up at
the cut, and the code that made it is differentiated when the first block that used it has been.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.runtime.again import Call, Replay
from outsize.runtime.runners import StageRecord


class Entered:
    """One block's call: the cuts of its inputs, its record, the gradients of its outputs.

    fresh: (the glue's tensor, its cut) of the inputs that are first used here.
    """

    def __init__(
        self,
        index: int,
        call: Call | None,
        fresh: list[tuple[Tensor, Tensor]],
        leaves: list[Tensor],
        learns: bool,
    ) -> None:
        self.index, self.call, self.leaves, self.learns = index, call, leaves, learns
        self.fresh = fresh
        self.record: StageRecord | None = None
        self.replay: Replay | None = None
        self.given: list[Tensor] = []
        self.places: Sequence[int] = ()  # of what is given, among the block's outputs
        self.gradients: dict[int, Tensor] = {}  # by output

    def add(self, output: int, gradient: Tensor) -> None:
        """Add to the gradient of an output."""
        have = self.gradients.get(output)
        self.gradients[output] = gradient if have is None else have + gradient

    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that the glue behind this block sends to what it was given."""
        for output, gradient in zip(self.places, gradients, strict=True):
            if gradient is not None:
                self.add(output, gradient)

    def hand(self) -> list[Tensor]:
        """The outputs as the module's code receives them."""
        outs = self.given
        if self.learns and outs:
            outs = list(_Cut.apply(torch.empty(0, requires_grad=True), self))  # type: ignore[no-untyped-call]
        self.given = []
        return outs

    def backward(self) -> None:
        """Differentiate the block, then the code that made what it was the first to use."""
        if self.record is None:
            return
        gradients, self.gradients = self.gradients, {}
        if gradients:
            self.record.backward([gradients.get(i) for i in self.places])
        self.record = None
        # Glue graphs may share nodes (one mask, one encoder output), so they are retained; they
        # go when the walk lets the tensors go.
        pairs = [(made, cut.grad) for made, cut in self.fresh if cut.grad is not None]
        if pairs:
            torch.autograd.backward(
                [made for made, _ in pairs], [g for _, g in pairs], retain_graph=True
            )
        self.fresh.clear()
        self.call, self.leaves = None, []


class _Cut(torch.autograd.Function):
    """The outputs of a block as the module's code receives them; gradients go to the walk."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entered: Entered) -> tuple[Tensor, ...]:
        ctx.entered = entered
        ctx.set_materialize_grads(False)
        outs = tuple(out.detach() for out in entered.given)
        ctx.mark_non_differentiable(*(out for out in outs if not out.is_floating_point()))
        return outs

    @staticmethod
    def backward(ctx: Any, *gouts: Tensor | None) -> tuple[None, None]:
        ctx.entered.collect(gouts)
        return None, None
