"""Blocks and the epilogue run a chunk of the sequence at a time, forward and back, exactly.

Nothing of a block depends on other tokens but its mixer, by what earlier tokens left there: keys
and values, or a recurrent state. Forward, chunks go from the first to the last. Back, from the last
to the first: a chunk is run again, differentiated and let go before the next one begins, so that of
a whole sequence there are only the block's input, its gradient (in the place of its output's), what
its tokens left and the gradients of that. (Luo et al., "StreamBP", 2025; outsize/models/chunked.py
has the attention.)

Where a tensor axis cuts the tokens between branches, every worker has its part of each chunk, so
that a chunk is gathered as it lies. Where an axis cuts the tokens of rows, what all of them leave
is gathered first, chunks follow in any order, and what the workers found of its gradients is summed
before it goes through the projections.

T tokens of a microbatch, C of a chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outsize.collectives.turns import differentiating
from outsize.models.chunk import Caught, ChunkCarry, Left, Shared
from outsize.models.chunked import ChunkAttend
from outsize.models.seams import Carry, Context
from outsize.models.wiring import AnyBlock
from outsize.parallel.shards import even
from outsize.runtime.again import backward
from outsize.runtime.spill import Handle, Spill, restore

Run = Callable[[Tensor, "Piece"], Tensor]


def pieces(tokens: int, chunk: int, most: int = 0) -> list[slice]:
    """The chunks of a sequence, the last one shorter where they do not divide. most: as many as so
    many tokens would have, all alike."""
    if most:
        return [slice(*span) for span in pairwise(even(0, tokens, -(-most // chunk)))]
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


@dataclass(frozen=True)
class Piece:
    """A chunk. rows: of what lies here between branches; tokens: of the Context's; start: its first
    token among all that are attended to."""

    rows: slice
    tokens: slice
    start: int

    @property
    def count(self) -> int:
        """Of its tokens."""
        return int(self.tokens.stop - self.tokens.start)


def pieces_of(context: Context, chunk: int) -> list[Piece]:
    """The chunks of a Context's tokens, each a stretch of what is attended to."""
    shared, found, row, at = shared_of(context), list[Piece](), 0, 0
    for first, last in ((0, context.bounds[-1]),) if shared is None else shared.spans:
        for here in pieces(last - first, chunk, context.most):
            low, high = context.between(here.stop - here.start)
            rows, tokens = slice(row, row + high - low), slice(at + here.start, at + here.stop)
            found.append(Piece(rows, tokens, first + here.start))
            row = rows.stop
        at += last - first
    return found


def shared_of(context: Context) -> Shared | None:
    """How tokens are shared with other workers, if they are."""
    return context.attend if isinstance(context.attend, Shared) else None


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
        self._pieces, self._shared = pieces_of(context, chunk), shared_of(context)
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
        shared = self._shared is not None
        held = self._left(block, x_TD) if shared else Left(self.context.bounds)
        y_TD = x_TD.new_empty(0)
        for index, here in enumerate(self._pieces):
            y_CD = block(x_TD[here.rows], self._context(here, held))
            if not index:  # a block may give more features than it takes
                y_TD = y_CD.new_empty((x_TD.shape[0], *y_CD.shape[1:]))
            y_TD[here.rows] = y_CD
        return y_TD

    @torch.no_grad()
    def _left(self, block: AnyBlock, x_TD: Tensor) -> Left:
        """What all tokens leave, those of other workers too."""
        held = Left(self.context.bounds, every=True)
        for here in self._pieces:
            block.leave(x_TD[here.rows], self._context(here, held, here.tokens.start))
        return held if self._shared is None else self._shared.gathered(held)

    def _differentiate(self, index: int, x_TD: Tensor, g_TD: Tensor) -> Tensor | None:
        """The gradient of a block's input, in the place of its output's if that is as wide."""
        block, wanted = self.blocks[index], self._wanted(index)
        held = self._held or self._left(block, x_TD)
        g_TD = g_TD.contiguous()
        gx_TD = g_TD if g_TD.shape == x_TD.shape else torch.zeros_like(x_TD)
        for here in reversed(self._pieces):
            x_CD = x_TD[here.rows].detach().requires_grad_(wanted)
            with torch.enable_grad():
                y_CD: Tensor = block(x_CD, self._context(here, held))
            if not y_CD.requires_grad:
                return None
            with differentiating(y_CD.device):
                torch.autograd.backward(y_CD, g_TD[here.rows])
            if wanted:
                gx_TD[here.rows], x_CD.grad = 0.0 if x_CD.grad is None else x_CD.grad, None
        if self._shared is not None:
            self._project(block, x_TD, gx_TD if wanted else None, self._shared.summed(held))
        return gx_TD if wanted else None

    def _project(
        self, block: AnyBlock, x_TD: Tensor, gx_TD: Tensor | None, gradients: Sequence[Tensor]
    ) -> None:
        """Differentiate what the tokens that are here leave, with the sums of all workers; adds to
        the input's gradient."""
        for here in self._pieces:
            x_CD, caught = x_TD[here.rows].detach().requires_grad_(gx_TD is not None), Caught()
            with torch.enable_grad():
                block.leave(x_CD, self._context(here, None, carry=caught))
            backward(list(caught.left), [g[here.tokens].to(x_TD.dtype) for g in gradients])
            if gx_TD is not None and x_CD.grad is not None:
                gx_TD[here.rows] += x_CD.grad

    def _wanted(self, index: int) -> bool:
        """Whether anything before the block can use a gradient."""
        earlier = (p for block in self.blocks[:index] for p in block.parameters())
        return self.inputs[0].requires_grad or any(p.requires_grad for p in earlier)

    def _context(
        self,
        here: Piece,
        held: Left | None,
        start: int | None = None,
        carry: Carry | None = None,
    ) -> Context:
        """Of a chunk. held: what it attends to and leaves; start: where it leaves that."""
        start = here.start if start is None else start
        attend = self.context.attend
        if held is not None:
            carry, attend = ChunkCarry(held, start, start + here.count), ChunkAttend(held, start)
        assert carry is not None
        made = self.context.at(here.tokens.start, here.tokens.stop, attend, carry)
        return replace(made, most=min(self.context.most, self.chunk))


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, run: Run, every: Sequence[Piece], train: bool) -> Tensor:
        wanted = train and ctx.needs_input_grad[0]
        ctx.gx_TD = torch.empty_like(x_TD) if wanted else None
        losses = _losses(x_TD, run, every, train, ctx.gx_TD)
        return torch.stack(list(losses)).sum()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, None, None, None]:
        gx_TD, ctx.gx_TD = ctx.gx_TD, None  # made for gy == 1, as that of the loss is
        return gx_TD, None, None, None


def _losses(
    x_TD: Tensor, run: Run, every: Sequence[Piece], train: bool, gx_TD: Tensor | None
) -> Iterator[Tensor]:
    for here in every:
        x_CD = x_TD[here.rows].detach().requires_grad_(gx_TD is not None)
        with torch.set_grad_enabled(train):
            loss = run(x_CD, here)
        if loss.requires_grad:
            with differentiating(loss.device):
                torch.autograd.backward(loss)
        if gx_TD is not None:
            gx_TD[here.rows], x_CD.grad = 0.0 if x_CD.grad is None else x_CD.grad, None
        yield loss.detach()


def chunked_sum(x_TD: Tensor, run: Run, every: Sequence[Piece]) -> Tensor:
    """Sum of the losses run(x_CD, chunk) of all chunks, each differentiated as soon as it is
    made: gradients of weights are made here, and the backward pass hands on that of x_TD (so
    the sum must be differentiated with gradient 1)."""
    train = torch.is_grad_enabled()
    loss: Tensor = _ChunkedSum.apply(x_TD, run, every, train)  # type: ignore[no-untyped-call]
    return loss
