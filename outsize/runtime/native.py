"""The flow of a native decoder: a chain of prologue, blocks and epilogue over flat tokens.

T tokens of a microbatch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.data import Batch
from outsize.kernels.linear import GradSink
from outsize.kernels.loss import Head, chunked_loss
from outsize.models.build import segments
from outsize.models.decoder import Decoder
from outsize.models.names import stays_float32
from outsize.plan import Plan
from outsize.runtime.flow import Record, input_leaf
from outsize.runtime.gradients import Gradients


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
        self.blocks = list(model.blocks)
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

    def begin(self, part: Part, factor: float) -> ChainWalk:
        model = self.model
        context = model.context(part.positions_T, part.bounds)
        head = self._head(factor, part.ids_T.shape[0])

        def prologue(_: Tensor) -> Tensor:
            return model.prologue(part.ids_T, context)  # type: ignore[no-any-return]

        def loss(x_TD: Tensor) -> Tensor:
            h_TD = model.epilogue(x_TD, context)
            weight, bias = model.epilogue.head.weight, model.epilogue.head.bias
            return chunked_loss(h_TD, weight, bias, part.targets_T, head)

        def block(module: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda x_TD: module(x_TD, context)

        chain = [prologue, *(block(b) for b in model.blocks), loss]
        return ChainWalk(chain, self.plan, self._trainable_from, part.ids_T)

    def _head(self, factor: float, tokens: int) -> Head:
        epilogue = self.model.epilogue
        sink: GradSink | None = None if self._sink is None else self._sink.now
        chunk = self.plan.loss_chunk or tokens
        return Head(factor, chunk, sink, epilogue.logit_scale, epilogue.softcap)


class ChainWalk:
    """A walk along functions from one tensor to the next."""

    def __init__(
        self,
        chain: Sequence[Callable[[Tensor], Tensor]],
        plan: Plan,
        trainable_from: int,
        start: Tensor,
    ) -> None:
        self._chain, self._plan, self._trainable_from = chain, plan, trainable_from
        self._carry: Tensor | None = start
        self._gradient: list[Tensor | None] = [None]
        self._records: dict[int, Record] = {}
        self.loss: Tensor | None = None

    def forward(self, stage: int) -> None:
        here = self._plan.stages[stage]
        functions = self._chain[here.first : here.last]

        def run(tensors: list[Tensor]) -> list[Tensor]:
            (x,) = tensors
            for function in functions:
                x = function(x)
            return [x]

        assert self._carry is not None
        carry, self._carry = self._carry, None
        record = Record(run, [input_leaf(carry, here.first > self._trainable_from)])
        train = torch.is_grad_enabled() and here.last > self._trainable_from
        (out,) = record.forward(train and not here.whole)
        if train:
            self._records[stage] = record
        if stage == len(self._plan.stages) - 1:
            self.loss, self._gradient = out, [torch.ones_like(out)]
        else:
            self._carry = out

    def recompute(self, stage: int) -> None:
        self._records[stage].forward(True)

    def backward(self, stage: int) -> None:
        gradient, self._gradient = self._gradient, []
        self._gradient = self._records.pop(stage).backward(gradient)
