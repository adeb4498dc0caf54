"""Blocks and the epilogue run a chunk of the sequence at a time, forward and back, exactly.

Nothing of a block depends on other tokens but its mixer, by what earlier tokens left there: keys
and values, or a recurrent state. Forward, chunks go from the first to the last. Back, from the last
to the first: a chunk is run again, differentiated and let go before the next one begins, so that of
a whole sequence there are only the block's input, its gradient (in the place of its output's), what
its tokens left and the gradients of that. (Luo et al., "StreamBP", 2025; outsize/models/chunked.py
has the attention.)

T tokens of a microbatch, C of a chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outsize.models.chunk import ChunkCarry, Left
from outsize.models.chunked import ChunkAttend
from outsize.models.seams import Context
from outsize.models.wiring import AnyBlock
from outsize.parallel.shards import even
from outsize.runtime.spill import Handle, Spill, restore


def pieces(tokens: int, chunk: int, most: int = 0) -> list[slice]:
    """The chunks of a sequence, the last one shorter where they do not divide. most: as many as so
    many tokens would have, all alike."""
    if most:
        return [slice(*span) for span in pairwise(even(0, tokens, -(-most // chunk)))]
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


class ChunkRecord:
    """What Record is, of a stage of whole blocks, a chunk at a time. Between the passes it keeps
    the stage's input alone; spill: where that goes, if it leaves the device."""

    def __init__(
        self,
        blocks: Sequence[AnyBlock],
        context: Context,
        chunk: int,
        x_TD: Tensor,
        spill: Spill | None = None,
    ) -> None:
        self.blocks, self.context, self.chunk = blocks, context, chunk
        self._pieces = pieces(x_TD.shape[0], chunk, context.most)
        self.inputs, self.spill = [x_TD], spill
        self._xs: list[Tensor] = []  # inputs of the blocks, once they are computed again
        self._held: Left | None = None
        self._handles: list[Handle | None] = []

    def forward(self, keep: bool) -> list[Tensor]:
        """Run without a graph."""
        assert not keep, "a stage that runs in chunks is recomputed whole"
        x_TD = self.inputs[0].detach()
        for block in self.blocks:
            x_TD = self._run(block, x_TD)
        if self.spill is not None:
            self._handles = self.spill.hold(self.inputs)
        return [x_TD]

    @torch.no_grad()
    def again(self) -> None:
        """Make the inputs of the stage's further blocks again, and what its last one leaves."""
        restore(self.inputs, self._handles)
        self.spill, self._handles = None, []
        self._xs = [self.inputs[0].detach()]
        for block in self.blocks[:-1]:
            self._xs.append(self._run(block, self._xs[-1]))
        self._held = self._left(self.blocks[-1], self._xs[-1])

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Differentiate; gives the input's gradient and lets everything go."""
        (g_TD,) = gradients
        for index in reversed(range(len(self.blocks))):
            x_TD = self._xs.pop()
            if g_TD is not None:
                g_TD = self._differentiate(index, x_TD, g_TD)
            self._held = None
        return [g_TD]

    @torch.no_grad()
    def _run(self, block: AnyBlock, x_TD: Tensor) -> Tensor:
        y_TD, held = x_TD.new_empty(0), Left(self.context.bounds)
        for here in self._pieces:
            y_CD = block(x_TD[here], self._context(here, held))
            if not here.start:  # a block may give more features than it takes
                y_TD = y_CD.new_empty((x_TD.shape[0], *y_CD.shape[1:]))
            y_TD[here] = y_CD
        return y_TD

    @torch.no_grad()
    def _left(self, block: AnyBlock, x_TD: Tensor) -> Left:
        held = Left(self.context.bounds, every=True)
        for here in self._pieces:
            block.leave(x_TD[here], self._context(here, held))
        return held

    def _differentiate(self, index: int, x_TD: Tensor, g_TD: Tensor) -> Tensor | None:
        """The gradient of a block's input, in the place of its output's if that is as wide."""
        block, wanted = self.blocks[index], self._wanted(index)
        held = self._held or self._left(block, x_TD)
        g_TD = g_TD.contiguous()
        gx_TD = g_TD if g_TD.shape == x_TD.shape else torch.zeros_like(x_TD)
        for here in reversed(self._pieces):
            x_CD = x_TD[here].detach().requires_grad_(wanted)
            with torch.enable_grad():
                y_CD: Tensor = block(x_CD, self._context(here, held))
            if not y_CD.requires_grad:
                return None
            torch.autograd.backward(y_CD, g_TD[here])
            if x_CD.grad is not None:
                gx_TD[here], x_CD.grad = x_CD.grad, None
        return gx_TD if wanted else None

    def _wanted(self, index: int) -> bool:
        """Whether anything before the block can use a gradient."""
        earlier = (p for block in self.blocks[:index] for p in block.parameters())
        return self.inputs[0].requires_grad or any(p.requires_grad for p in earlier)

    def _context(self, here: slice, held: Left) -> Context:
        carry = ChunkCarry(held, here.start, here.stop)
        attend, most = ChunkAttend(held, here.start), min(self.context.most, self.chunk)
        return replace(self.context.at(here.start, here.stop, attend, carry), most=most)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, run: Callable[[Tensor, slice], Tensor], chunk: int, train: bool
    ) -> Tensor:
        wanted = train and ctx.needs_input_grad[0]
        ctx.gx_TD = torch.empty_like(x_TD) if wanted else None
        losses = _losses(x_TD, run, chunk, train, ctx.gx_TD)
        return torch.stack(list(losses)).sum()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None, None]:
        gx_TD, ctx.gx_TD = ctx.gx_TD, None  # made for gy == 1, as that of the loss is
        return gx_TD, None, None, None


def _losses(
    x_TD: Tensor,
    run: Callable[[Tensor, slice], Tensor],
    chunk: int,
    train: bool,
    gx_TD: Tensor | None,
) -> Iterator[Tensor]:
    for here in pieces(x_TD.shape[0], chunk):
        x_CD = x_TD[here].detach().requires_grad_(gx_TD is not None)
        with torch.set_grad_enabled(train):
            loss = run(x_CD, here)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        if gx_TD is not None:
            gx_TD[here], x_CD.grad = 0.0 if x_CD.grad is None else x_CD.grad, None
        yield loss.detach()


def chunked_sum(x_TD: Tensor, run: Callable[[Tensor, slice], Tensor], chunk: int) -> Tensor:
    """Sum of the losses run(x_CD, tokens) of all chunks, each differentiated as soon as it is
    made: gradients of weights are made here, and the backward pass hands on that of x_TD (so
    the sum must be differentiated with gradient 1)."""
    train = torch.is_grad_enabled()
    loss: Tensor = _ChunkedSum.apply(x_TD, run, chunk, train)  # type: ignore[no-untyped-call]
    return loss
