"""One microbatch through an adopted module, or through the part of it that one worker has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.runtime.adopted.absent import Absent, Place, Source, form_of, said
from outsize.runtime.adopted.aside import (
    Written,
    own_graphs,
    passing,
    refuse_transforms,
    unchanged,
)
from outsize.runtime.adopted.entered import Entered
from outsize.runtime.adopted.exchange import Exchange
from outsize.runtime.adopted.logits import Heads
from outsize.runtime.adopted.reach import UNSEEN, Uncut, check_kinds, check_order
from outsize.runtime.again import Call, Replay, leaf
from outsize.runtime.flow import Record, SpillOf, no_spill
from outsize.runtime.runners import StageRecord
from outsize.runtime.spill import Spill

if TYPE_CHECKING:
    from outsize.runtime.adopted.flow import AdoptedFlow


@dataclass(frozen=True)
class Share:
    """What a worker has of a walk.

    segments: those that run here. crossing: by stage, the outputs of blocks up to it that are
    needed behind it, in the order in which they are sent. sends: the stages whose outputs are taken
    from here. places: stand-ins for the parameters that are not here.
    """

    segments: frozenset[int]
    crossing: Mapping[int, tuple[Source, ...]]
    sends: tuple[int, ...]
    places: tuple[Place, ...]


class AdoptedWalk:
    """One microbatch through an adopted module."""

    def __init__(
        self,
        flow: AdoptedFlow,
        whole: Callable[[], Tensor],
        spill_of: SpillOf = no_spill,
        share: Share | None = None,
    ) -> None:
        import greenlet

        self._flow, self._spill_of, self._share = flow, spill_of, share
        self._last = len(flow.blocks) + 1
        self._train = torch.is_grad_enabled()
        self.glue = greenlet.greenlet(lambda _: whole())
        self._cuts: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (the glue's tensor, its cut)
        self._calls: list[Entered] = []
        self._waiting: Entered | None = None
        self.called = False  # a block, by the module's code
        self._ended = False
        self._output: Tensor | None = None
        self.loss: Tensor | None = None
        self._exchange = Exchange(share)
        chunk = flow.plan.loss_chunk
        self._heads = Heads(chunk, self._behind) if chunk else None
        self._forms: dict[Source, Tensor] = {}  # of outputs, in a walk of all stages

    # -- called from the module's own code, inside the greenlet ----------------------------------

    def enter(self, index: int, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Give a block's call over; comes back with the block's outputs."""
        check_order(index, len(self._calls), self._flow.paths)
        refuse_transforms(self._flow.paths[index])
        self.called = True
        learns = torch.is_grad_enabled()  # the module may freeze a part of itself
        call = Call(unchanged(self._flow.paths[index], plain), args, kwargs)
        if self._share is not None and index + 1 not in self._share.segments:
            return self._elsewhere(index, call, learns)
        self._check_present(index, call)
        fresh: list[tuple[Tensor, Tensor]] = []
        leaves = [self._cut(tensor, fresh) if learns else tensor for tensor in call.tensors]
        entered = Entered(index, call, fresh, leaves, learns)
        parent = self.glue.parent
        assert parent is not None
        parent.switch(entered)
        torch.set_grad_enabled(learns)
        call.casts.enter()
        return call.result(entered.hand())

    def _elsewhere(self, index: int, call: Call, learns: bool) -> Any:
        """What another worker's block gives: what was sent of it, the rest absent."""
        outline = self._flow.outlines.of(index, call)
        outs = outline.absent(index + 1, self._flow.paths[index])
        entered = Entered(index, None, [], [], learns)
        entered.places, entered.given = self._exchange.known(index + 1)
        for place, out in zip(entered.places, entered.hand(), strict=True):
            outs[place] = out
        self._calls.append(entered)
        return outline.result(outs)

    def _check_present(self, index: int, call: Call) -> None:
        if self._share is None:
            return
        path = self._flow.paths[index]
        check_kinds(call, path, UNSEEN)
        for tensor in call.tensors:
            if isinstance(tensor, Absent):
                raise _unforeseen(f"block {path!r}", tensor)

    def _cut(self, tensor: Tensor, fresh: list[tuple[Tensor, Tensor]]) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        known = self._cuts.get(id(tensor))
        if known is None:
            known = self._cuts[id(tensor)] = (tensor, leaf(tensor))
            fresh.append(known)
        return known[1]

    # -- called by the runtime -------------------------------------------------------------------

    def _behind(self) -> bool:
        """Whether the module's code has called its last block."""
        return len(self._calls) == len(self._flow.blocks)

    def _advance(self) -> None:
        """Let the module's code run to the next call of a block that is here, or to its end."""
        self._exchange.part()
        places = () if self._share is None else self._share.places
        with nullcontext() if self._heads is None else self._heads:
            arrived = self._flow.run_glue(self, lambda: self.glue.switch(None), places)
        if isinstance(arrived, Entered):
            self._waiting = arrived
        else:
            self._ended, self._output = True, arrived

    def forward(self, stage: int) -> None:
        here = self._flow.plan.stages[stage]
        with torch.set_grad_enabled(self._train):
            for segment in range(here.first, here.last):
                self._segment(segment, here.whole, stage)
        if self._share is not None and here.last > max(self._share.segments):
            self._leave()

    def _segment(self, segment: int, whole: bool, stage: int) -> None:
        if segment == self._last:
            self._end()
            return
        alone = self._share is not None and 1 not in self._share.segments
        if segment == 0 and alone:
            return
        if self._waiting is None and not self._ended:
            self._advance()
        if segment == 0:
            return
        entered, self._waiting = self._waiting, None
        if entered is None:
            path = self._flow.paths[segment - 1]
            raise Uncut(f"block {path!r} is not called by the module's forward; leave it out")
        self._calls.append(entered)
        self._run_block(entered, whole, stage)
        if self._share is not None:
            self._exchange.keep(segment, entered.given)
        else:
            path = self._flow.paths[entered.index]
            outs = enumerate(entered.given)
            self._forms |= {Source(segment, i, path): form_of(out) for i, out in outs}

    def _run_block(self, entered: Entered, whole: bool, stage: int) -> None:
        assert entered.call is not None
        path, block = self._flow.paths[entered.index], self._flow.blocks[entered.index]
        if whole and (entered.learns or self._flow.runner is not None):
            again = "so it cannot be computed again"  # what runs twice must not remember it
            check_kinds(entered.call, path, again, " or set recompute to nothing")
        written = Written(path, entered.leaves, whole and entered.learns)
        try:  # among the context variables of the code that called it, as output recorders ask
            context = self.glue.gr_context or copy_context()
            context.run(self._forward, entered, path, block, whole, stage)
        except RuntimeError as error:
            raise written.refused(error) from None
        written.check()
        entered.places = range(len(entered.given))

    def _forward(
        self, entered: Entered, path: str, block: nn.Module, whole: bool, stage: int
    ) -> None:
        if not entered.learns:
            with torch.no_grad():
                record = self._record(entered, path, block, whole, None)
                entered.given = record.forward(False)
            return
        if whole:
            entered.replay = Replay(block)
        entered.record = self._record(entered, path, block, whole, self._spill_of(stage))
        entered.given = entered.record.forward(not whole)
        if entered.replay is not None:
            entered.replay.ended()

    def _record(
        self, entered: Entered, path: str, block: nn.Module, whole: bool, spill: Spill | None
    ) -> StageRecord:
        call, runner = entered.call, self._flow.runner
        assert call is not None
        if whole and runner is not None:
            return runner.call(path, block, call, entered.leaves, spill)
        run = passing(path, call.run) if whole and entered.learns else call.run
        return Record(run, entered.leaves, spill, own=False)

    def _end(self) -> None:
        if self._flow.blocks:  # else the prologue was everything
            self._advance()
        if not self._ended:
            assert self._waiting is not None
            path = self._flow.paths[self._waiting.index]
            raise Uncut(f"block {path!r} is called again at the end of the forward")
        output = self._output
        if isinstance(output, Absent):
            raise _unforeseen("the loss", output)
        assert isinstance(output, Tensor), "the flow has looked at it"
        if self._train and not output.requires_grad:
            raise OutsizeError(
                "loss depends on no parameter that is trained; expected one that can be"
                " differentiated: compute it of the output, without detach() or no_grad()"
            )
        if self._heads is not None and self._train:
            self._heads.check()
        self.loss = output.detach()

    def _leave(self) -> None:
        """Nothing here needs what the module's code would do from here on."""
        if not self._ended:
            self._ended = True
            self._flow.run_glue(self, self.glue.throw, ())
            if self._calls:  # what its last block gave is for others
                self._calls[-1].given = []

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
        self._flow.looking = False
        self._cuts.clear()  # no block is called any more; each lets go of its own
        for segment in reversed(range(here.first, here.last)):
            if segment == self._last:
                output, self._output = self._output, None
                assert output is not None
                with self._flow.going_back(segment), own_graphs():
                    torch.autograd.backward(output, retain_graph=True)
                continue
            if segment:
                with self._flow.going_back(segment), own_graphs():
                    self._calls[segment - 1].backward()
            if segment == 0:
                self._calls.clear()

    # -- called by the runtime of a pipeline -----------------------------------------------------

    def take(self, stage: int) -> list[Tensor]:
        """What is needed behind a stage, of its outputs and of earlier ones, to be sent. In a walk
        of all stages, without values: what would be."""
        if self._share is None:
            return [self._forms[source] for source in self._flow.crossing(stage)]
        return self._exchange.take(stage, self._ended)

    def put(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """What the worker of a stage sent; the next stage is here."""
        if self._share is not None:
            self._exchange.put(stage, tensors)

    def take_gradient(self, stage: int) -> list[Tensor | None]:
        """Gradients of those that were put and are floating, after the next stage's backward."""
        return self._exchange.take_gradient(stage, self._calls)

    def put_gradient(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        """Gradients of those that were taken and are floating, before the stage's backward."""
        self._exchange.put_gradient(stage, gradients, self._calls)


def _unforeseen(what: str, tensor: Absent) -> OutsizeError:
    return OutsizeError(
        f"{what} reads the {said(tensor.origin.sources)}, which another worker of the pipeline has"
        " and which it did not read in the first batch; give batches of one kind, or put all"
        " workers on the data axis"
    )
