"""The flow of a native decoder: a chain of prologue, blocks and epilogue over flat tokens.

T tokens of a microbatch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from outsize.data import Batch
from outsize.kernels.linear import GradSink
from outsize.kernels.loss import Head, chunked_loss
from outsize.models.build import segments
from outsize.models.decoder import Block, Decoder
from outsize.models.names import stays_float32
from outsize.plan import Plan, Stage
from outsize.runtime.flow import Record, SpillOf, input_leaf, no_spill
from outsize.runtime.gradients import Gradients
from outsize.runtime.sequence import ChunkRecord, chunked_sum
from outsize.runtime.spill import Spill


@dataclass(frozen=True)
class Part:
    """A microbatch laid flat, on the device."""

    ids_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    bounds: tuple[int, ...]


class NativeFlow:
    """A Decoder as the runtime sees it. It draws no random numbers and has no buffers."""

    replay = False

    def __init__(self, model: Decoder, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.blocks: list[Block] = [block for block in model.blocks if isinstance(block, Block)]
        self.device = next(model.parameters()).device
        named = dict(model.named_parameters())
        self.wide = frozenset(filter(stays_float32, named))
        self.segments = tuple(
            (name, tuple((n, named[n]) for n in names)) for name, names in segments(model)
        )
        self._trainable_from = next(
            (i for i, (_, ps) in enumerate(self.segments) if any(p.requires_grad for _, p in ps)),
            len(self.segments),
        )
        head = model.epilogue.head.weight
        shared = any(head is p for _, p in self.segments[0][1])
        own = [(i,) for i in range(len(self.segments) - 1)]
        self.uses = (*own, (len(own), 0) if shared else (len(own),))
        self._sink: Gradients | None = None

    def attach(self, sink: Gradients | None) -> None:
        self._sink = sink
        for module in self.model.modules():
            if "sink" in module.__dict__:
                module.sink = sink  # type: ignore[assignment]

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(float(batch.count()), dtype=torch.float64)

    def part(self, batch: Batch, start: int, stop: int) -> Part:
        rows = batch.rows(start, stop)
        ids, positions, targets = (
            t.reshape(-1).to(self.device) for t in (rows.ids_BS, rows.positions(), rows.targets_BS)
        )
        return Part(ids, positions, targets, rows.flat_bounds())

    def begin(self, part: Part, factor: float, spill_of: SpillOf = no_spill) -> ChainWalk:
        model = self.model
        context = model.context(part.positions_T, part.bounds)
        head = self._head(factor, part.ids_T.shape[0])

        def prologue(_: Tensor) -> Tensor:
            return model.prologue(part.ids_T, context)  # type: ignore[no-any-return]

        def loss_of(x_CD: Tensor, here: slice) -> Tensor:
            h_CD = model.epilogue(x_CD, context)
            weight, bias = model.epilogue.head.weight, model.epilogue.head.bias
            return chunked_loss(h_CD, weight, bias, part.targets_T[here], head)

        chunk = self.plan.sequence_chunk

        def loss(x_TD: Tensor) -> Tensor:
            if chunk:
                return chunked_sum(x_TD, loss_of, chunk)
            return loss_of(x_TD, slice(None))

        def block(module: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda x_TD: module(x_TD, context)

        chain = [prologue, *(block(b) for b in model.blocks), loss]

        def record(here: Stage, x: Tensor, spill: Spill | None) -> Record | ChunkRecord:
            if chunk and here.whole:
                blocks = self.blocks[here.first - 1 : here.last - 1]
                return ChunkRecord(blocks, context, chunk, x, spill)
            return Record(partial(_through, chain[here.first : here.last]), [x], spill)

        return ChainWalk(record, self.plan, self._trainable_from, part.ids_T, spill_of)

    def _head(self, factor: float, tokens: int) -> Head:
        epilogue = self.model.epilogue
        sink: GradSink | None = None if self._sink is None else self._sink.now
        chunk = self.plan.loss_chunk or tokens
        return Head(factor, chunk, sink, epilogue.logit_scale, epilogue.softcap)


def _through(functions: Sequence[Callable[[Tensor], Tensor]], given: list[Tensor]) -> list[Tensor]:
    (x,) = given
    for function in functions:
        x = function(x)
    return [x]


class ChainWalk:
    """A walk along stages from one tensor to the next. record: how a stage runs on its input, and
    what takes what it keeps."""

    def __init__(
        self,
        record: Callable[[Stage, Tensor, Spill | None], Record | ChunkRecord],
        plan: Plan,
        trainable_from: int,
        start: Tensor,
        spill_of: SpillOf = no_spill,
    ) -> None:
        self._spill_of = spill_of
        self._record, self._plan, self._trainable_from = record, plan, trainable_from
        self._carry: Tensor | None = start
        self._gradient: list[Tensor | None] = [None]
        self._records: dict[int, Record | ChunkRecord] = {}
        self.loss: Tensor | None = None

    def forward(self, stage: int) -> None:
        here = self._plan.stages[stage]
        assert self._carry is not None
        carry, self._carry = self._carry, None
        train = torch.is_grad_enabled() and here.last > self._trainable_from
        spill = self._spill_of(stage) if train else None
        x = input_leaf(carry, here.first > self._trainable_from)
        record = self._record(here, x, spill)
        del carry, x
        (out,) = record.forward(train and not here.whole)
        if train:
            self._records[stage] = record
        if stage == len(self._plan.stages) - 1:
            self.loss, self._gradient = out, [torch.ones_like(out)]
        else:
            self._carry = out

    def recompute(self, stage: int) -> None:
        self._records[stage].again()

    def backward(self, stage: int) -> None:
        gradient, self._gradient = self._gradient, []
        self._gradient = self._records.pop(stage).backward(gradient)
