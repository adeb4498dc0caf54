"""The flow of an adopted module: its own forward, entered and left at the blocks.

The module's forward runs as a coroutine (a greenlet). When it calls a block it gives the call over
and sleeps; the runtime runs the block when the schedule says so and hands the outputs back. What
the module computes between blocks ("glue") stays in its own code, of any shape: masks, skip
connections, an encoder's output that every decoder block reads.

Autograd is cut where a block's call enters and leaves. A tensor that enters is cut at its first
use, once, however many blocks read it; gradients add up at the cut, and the glue that made it is
differentiated when the first block that used it has been. The result is the plain gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.plan import Plan
from outsize.runtime.again import Call, Replay, leaf
from outsize.runtime.flow import Record, SpillOf, no_spill
from outsize.runtime.gradients import Gradients

_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


class AdoptedFlow:
    """Any module made of a sequence of blocks, as the runtime sees it.

    blocks: (path, module) in the order in which they are called. loss: from the module's output and
    the batch, the sum of the losses and what to divide it by; None: the output is the loss itself.
    """

    replay = True
    wide: frozenset[str] = frozenset()

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        plan: Plan,
        loss: Callable[[Any, Any], Tensor],
        split: Callable[[Any, int, int], Any] | None = None,
        counter: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if plan.sequence_chunk:
            raise OutsizeError(
                f"plan: sequence_chunk is {plan.sequence_chunk}, but {type(model).__name__} is an"
                " adopted module, whose attention is not known apart from the rest of a block:"
                " set it to 0, or load the model as a native decoder"
            )
        self.model, self.plan = model, plan
        self.paths = [path for path, _ in blocks]
        self.blocks = [block for _, block in blocks]
        self.segments = _segments(model, blocks)
        self.uses = _uses(model, self.blocks, self.segments)
        self._loss, self._split, self._counter = loss, split, counter
        self._current: AdoptedWalk | None = None
        for index, block in enumerate(self.blocks):
            block.forward = self._entry(index, block.forward)

    def _entry(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that gives the call over to the walk that is under way, if any."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            walk = self._current
            if walk is None or greenlet.getcurrent() is not walk.glue:
                return plain(*args, **kwargs)
            return walk.enter(index, plain, args, kwargs)

        return forward

    def attach(self, sink: Gradients | None) -> None:
        """Weights of adopted modules reach the buffers through autograd alone."""
        if sink is None:
            for block in self.blocks:
                del block.forward

    def count(self, batch: Any) -> Tensor:
        return (
            torch.ones((), dtype=torch.float64) if self._counter is None else self._counter(batch)
        )

    def part(self, batch: Any, start: int, stop: int) -> Any:
        return batch if self._split is None else self._split(batch, start, stop)

    def begin(self, part: Any, factor: float, spill_of: SpillOf = no_spill) -> AdoptedWalk:
        def whole() -> Tensor:
            args, kwargs = arguments(part)
            return self._loss(self.model(*args, **kwargs), part) * factor

        return AdoptedWalk(self, whole, spill_of)

    def run_glue(self, walk: AdoptedWalk, value: Any) -> Any:
        """Let the module's code run until it calls a block or ends."""
        before, self._current = self._current, walk
        grad = torch.is_grad_enabled()
        try:
            return walk.glue.switch(value)
        finally:
            torch.set_grad_enabled(grad)
            self._current = before


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch as call arguments: a mapping by keyword, a tuple by place, anything else alone."""
    if isinstance(batch, Mapping):
        return (), {str(key): value for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def _segments(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """Whatever belongs to no block (the head too), one segment a block, epilogue."""
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    named = [(name, p) for name, p in model.named_parameters()]
    of_block = [
        (path, [(n, p) for n, p in named if n.startswith(path + ".")]) for path, _ in blocks
    ]
    return [
        ("outside the blocks", [(n, p) for n, p in named if id(p) not in inside]),
        *of_block,
        ("epilogue", []),
    ]


def _uses(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    segments: Sequence[tuple[str, Sequence[tuple[str, nn.Parameter]]]],
) -> tuple[tuple[int, ...], ...]:
    """By segment: itself, whatever is outside the blocks (glue runs at any time), shared owners."""
    owner = {id(p): i for i, (_, named) in enumerate(segments) for _, p in named}
    inside = (
        {owner[id(p)] for p in block.parameters()} - {0, i} for i, block in enumerate(blocks, 1)
    )
    middle = ((i, 0, *sorted(others)) for i, others in enumerate(inside, start=1))
    return ((0,), *middle, (len(blocks) + 1, 0))


class _Cut(torch.autograd.Function):
    """The outputs of a block as the module's code receives them; gradients go to the walk."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entered: Entered) -> tuple[Tensor, ...]:
        ctx.entered = entered
        ctx.set_materialize_grads(False)
        given = tuple(out.detach() for out in entered.given)
        ctx.mark_non_differentiable(*(out for out in given if not out.is_floating_point()))
        return given

    @staticmethod
    def backward(ctx: Any, *gouts: Tensor | None) -> tuple[None, None]:
        ctx.entered.collect(gouts)
        return None, None


class Entered:
    """One block's call: the cuts of its inputs, its record, the gradients of its outputs."""

    def __init__(
        self,
        index: int,
        call: Call,
        fresh: list[tuple[Tensor, Tensor]],
        leaves: list[Tensor],
        learns: bool,
    ) -> None:
        self.index, self.call, self.leaves, self.learns = index, call, leaves, learns
        self.fresh = fresh  # (the glue's tensor, its cut) for those first used here
        self.record: Record | None = None
        self.replay: Replay | None = None
        self.given: list[Tensor] = []
        self.gradients: list[Tensor | None] = []

    def collect(self, gouts: Sequence[Tensor | None]) -> None:
        """Add gradients that the glue behind this block sends."""
        if not self.gradients:
            self.gradients = [None] * len(gouts)
        for i, g in enumerate(gouts):
            if g is not None:
                have = self.gradients[i]
                self.gradients[i] = g if have is None else have + g


class AdoptedWalk:
    """One microbatch through an adopted module."""

    def __init__(
        self, flow: AdoptedFlow, whole: Callable[[], Tensor], spill_of: SpillOf = no_spill
    ) -> None:
        self._flow, self._spill_of = flow, spill_of
        self._train = torch.is_grad_enabled()
        self.glue = greenlet.greenlet(lambda _: whole())
        self._cuts: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (the glue's tensor, its cut)
        self._calls: list[Entered] = []
        self._waiting: Entered | None = None
        self._ended = False
        self._output: Tensor | None = None
        self.loss: Tensor | None = None

    # -- called from the module's own code, inside the greenlet ----------------------------------

    def enter(self, index: int, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Give a block's call over; comes back with the block's outputs."""
        learns = torch.is_grad_enabled()  # the module may freeze a part of itself
        call = Call(plain, args, kwargs)
        fresh: list[tuple[Tensor, Tensor]] = []
        leaves = [self._cut(tensor, fresh) if learns else tensor for tensor in call.tensors]
        entered = Entered(index, call, fresh, leaves, learns)
        parent = self.glue.parent
        assert parent is not None
        parent.switch(entered)
        torch.set_grad_enabled(learns)
        outs = entered.given
        if learns:
            outs = list(_Cut.apply(torch.empty(0, requires_grad=True), entered))  # type: ignore[no-untyped-call]
        entered.given = []
        return call.result(outs)

    def _cut(self, tensor: Tensor, fresh: list[tuple[Tensor, Tensor]]) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        known = self._cuts.get(id(tensor))
        if known is None:
            known = self._cuts[id(tensor)] = (tensor, leaf(tensor))
            fresh.append(known)
        return known[1]

    # -- called by the runtime -------------------------------------------------------------------

    def _advance(self, value: Any) -> None:
        arrived = self._flow.run_glue(self, value)
        if isinstance(arrived, Entered):
            self._check(arrived)
            self._waiting = arrived
        else:
            self._ended, self._output = True, arrived

    def _check(self, entered: Entered) -> None:
        expected, paths = len(self._calls), self._flow.paths
        if entered.index == expected:
            return
        name = paths[entered.index]
        if entered.index < expected:
            raise OutsizeError(
                f"block {name!r} is called again after {paths[expected - 1]!r}; a block must be"
                " called once, in order: name other blocks by a path pattern"
            )
        raise OutsizeError(
            f"block {name!r} is called where {paths[expected]!r} was expected: blocks must be"
            " called in the order of the module tree; name them in order by path patterns"
        )

    def forward(self, stage: int) -> None:
        here = self._flow.plan.stages[stage]
        with torch.set_grad_enabled(self._train):
            for segment in range(here.first, here.last):
                self._segment(segment, here.whole, stage)

    def _segment(self, segment: int, whole: bool, stage: int) -> None:
        last = len(self._flow.blocks) + 1
        if segment == 0:
            self._advance(None)
            return
        if segment == last:
            self._end()
            return
        entered, self._waiting = self._waiting, None
        if entered is None:
            path = self._flow.paths[segment - 1]
            raise OutsizeError(
                f"block {path!r} is not called by the module's forward; leave it out"
            )
        self._calls.append(entered)
        self._run_block(entered, whole, stage)
        if segment < last - 1:
            self._advance(None)

    def _run_block(self, entered: Entered, whole: bool, stage: int) -> None:
        if not entered.learns:
            with torch.no_grad():
                entered.given = entered.call.run(entered.leaves)
            return
        if whole:
            self._check_again(entered)
            entered.replay = Replay(self._flow.blocks[entered.index])
        entered.record = Record(entered.call.run, entered.leaves, self._spill_of(stage), own=False)
        entered.given = entered.record.forward(not whole)

    def _check_again(self, entered: Entered) -> None:
        """What is computed twice must not remember that it ran."""
        for value in entered.call.rest:
            if not isinstance(value, _PLAIN):
                path = self._flow.paths[entered.index]
                raise OutsizeError(
                    f"block {path!r} receives a {type(value).__name__}, which may change while it"
                    " runs, so it cannot be computed again; pass none (use_cache=False) or set"
                    " recompute to nothing"
                )

    def _end(self) -> None:
        self._advance(None)
        if not self._ended:
            assert self._waiting is not None
            path = self._flow.paths[self._waiting.index]
            raise OutsizeError(f"block {path!r} is called again at the end of the forward")
        output = self._output
        if not isinstance(output, Tensor) or output.ndim:
            raise OutsizeError(
                f"loss is {type(output).__name__}; expected a scalar tensor: pass"
                " loss=function(output, batch)"
            )
        self.loss = output.detach()

    def recompute(self, stage: int) -> None:
        here = self._flow.plan.stages[stage]
        for segment in range(here.first, here.last):
            entered = self._calls[segment - 1]
            if not entered.learns:
                continue
            assert entered.record is not None and entered.replay is not None
            with entered.replay():
                entered.record.again()

    def backward(self, stage: int) -> None:
        here = self._flow.plan.stages[stage]
        for segment in reversed(range(here.first, here.last)):
            if segment == len(self._flow.blocks) + 1:
                output, self._output = self._output, None
                assert output is not None
                torch.autograd.backward(output, retain_graph=True)
                continue
            if segment:
                self._backward_block(self._calls[segment - 1])
            if segment == 0:
                self._calls.clear()
                self._cuts.clear()

    def _backward_block(self, entered: Entered) -> None:
        if entered.record is None:
            return
        gradients, entered.gradients = entered.gradients, []
        if gradients:
            entered.record.backward(gradients)
        entered.record = None
        # Glue graphs may share nodes (one mask, one encoder output), so they are retained; they
        # go when the walk lets the tensors go.
        pairs = [(made, cut.grad) for made, cut in entered.fresh if cut.grad is not None]
        if pairs:
            torch.autograd.backward(
                [made for made, _ in pairs], [g for _, g in pairs], retain_graph=True
            )
        entered.fresh.clear()
