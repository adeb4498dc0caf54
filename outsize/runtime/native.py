"""The flow of a native decoder: a chain of prologue, blocks and epilogue over flat tokens.

T tokens of a microbatch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outsize.data import Batch
from outsize.data.batch import IGNORE, taken
from outsize.errors import OutsizeError, counted
from outsize.kernels.entropy import DRAWN, PLAIN, LossOptions
from outsize.kernels.linear import GradSink
from outsize.kernels.loss import Head, Targets, chunked_loss
from outsize.models.build import segments
from outsize.models.decoder import Decoder, typed
from outsize.models.names import stays_float32
from outsize.models.seams import Attend, Context
from outsize.models.wiring import AnyBlock
from outsize.parallel.execution import LOCAL, Execution
from outsize.plan import Plan, Stage
from outsize.plan.approximate import MICROBATCH
from outsize.runtime.flow import Record, SpillOf, Way, input_leaf, no_spill
from outsize.runtime.rows import ROWS, Rows
from outsize.runtime.runners import RUNNERS, StageRecord, check_blocks, runner_of
from outsize.runtime.spill import Spill
from outsize.schedule import State
from outsize.schedule.ends import ends_of

if TYPE_CHECKING:
    from outsize.models.dropout import Noise
    from outsize.runtime.storage.gradients import Gradients

NO_HEADS: Mapping[int, nn.Module] = MappingProxyType({})
AUXILIARY = "auxiliary"  # how names of heads and of their parameters begin


@dataclass(frozen=True)
class Part:
    """A microbatch laid flat: the tokens that this worker has. lengths: of the whole
    documents, where a part of some is here; attend: how its tokens attend; most, rows: see
    Context."""

    ids_T: Tensor
    positions_T: Tensor
    targets: Targets
    bounds: tuple[int, ...]
    noise: Noise | None = None
    lengths: tuple[int, ...] | None = None
    attend: Attend | None = None
    most: int = 0
    rows: int = 0


class NativeFlow:
    """A Decoder as the runtime sees it. It draws no random numbers and has no buffers.

    options: of the loss in training; a pass without gradients gives the plain cross-entropy.
    execution: how tokens lie, attend and reach experts, and what is made of their cross-entropy.
    heads: auxiliary networks by segment, in order: the blocks before one learn by its loss, and
    those behind it begin with what these give. They are as epilogues, and no part of the model.
    """

    replay, splits = False, True

    def __init__(
        self,
        model: Decoder,
        plan: Plan,
        options: LossOptions = PLAIN,
        execution: Execution = LOCAL,
        heads: Mapping[int, nn.Module] = NO_HEADS,
    ) -> None:
        execution.check(model.config)
        if model.config.sided:
            _check_sided(plan)
        if MICROBATCH in plan.approximate:
            raise OutsizeError(
                f"plan: approximate holds {MICROBATCH} and nothing would be done: a decoder has no"
                " batch normalisation; leave it out"
            )
        self.model, self.plan, self.options = model, plan, options
        self.execution, self.loss = execution, execution.loss
        self.blocks: list[AnyBlock] = typed(model.blocks)
        self.heads = heads
        self.device = next(model.parameters()).device
        named = dict(model.named_parameters())
        parts = [(name, tuple((n, named[n]) for n in names)) for name, names in segments(model)]
        for i, (at, module) in enumerate(heads.items()):
            own = ((f"{AUXILIARY}.{i}.{n}", p) for n, p in module.named_parameters())
            parts.insert(at, (f"{AUXILIARY} {i}", tuple(own)))
            self.blocks.insert(at - 1, module)  # type: ignore[arg-type]
        self.segments = tuple(parts)
        self._trainable_from = self._first_trained()
        self.aside = frozenset(n for at in heads for n, _ in parts[at][1])
        self.wide = frozenset(n for _, params in parts for n, _ in params if stays_float32(n))
        head, ends = model.epilogue.head.weight_here, ends_of(plan.pipeline)
        self.rows = None if ends is None else ROWS.get(ends.name)(model, ends)
        shared = ends is None and any(head is p for _, p in self.segments[0][1])
        each = [(i,) for i in range(len(self.segments) - 1)]
        self.uses = (*each, (len(each), 0) if shared else (len(each),))
        self._sink: Gradients | None = None
        self._columns = () if self.loss is None else tuple(self.loss.columns)

    def _first_trained(self) -> int:
        """The segment, or their number where none is."""
        learns = (any(p.requires_grad for _, p in params) for _, params in self.segments)
        return next((i for i, one in enumerate(learns) if one), len(self.segments))

    def attach(self, sink: Gradients | None) -> None:
        self._sink, self._trainable_from = sink, self._first_trained()
        for module in chain.from_iterable(m.modules() for m in (self.model, *self.heads.values())):
            if "sink" in module.__dict__:
                module.sink = sink  # type: ignore[assignment]

    def count(self, batch: Batch) -> Tensor:
        self._check_virtual(batch)
        here = batch.tokens(self.execution.tokens.spans(batch.ids_BS.shape[1]))
        return torch.tensor([here.weight(), float(here.count())], dtype=torch.float64)

    def _check_virtual(self, batch: Batch) -> None:
        """OutsizeError where what stands in the place of virtual tokens is a target."""
        count = self.model.config.virtual
        if count and bool((batch.targets_BS[batch.positions() < count] != IGNORE).any()):
            raise OutsizeError(
                f"batch: a document has a target among its first {counted(count, 'token')}, whose"
                " place the adapter's virtual tokens take; expected so many tokens before each"
                " document, with the target -100"
            )

    def part(self, batch: Batch, start: int, stop: int) -> Part:
        whole = batch.rows(start, stop)
        count, tokens = whole.ids_BS.shape
        spans = self.execution.tokens.spans(tokens)
        rows = whole.tokens(spans)

        def flat(x_BS: Tensor) -> Tensor:
            return x_BS.reshape(-1)

        weights = None if rows.weights_BS is None else flat(rows.weights_BS)
        missing = [c for c in self._columns if c not in rows.columns]
        if missing:
            raise OutsizeError(
                f"batch: the loss reads the column {missing[0]!r} of each target, and the batch has"
                f" {sorted(rows.columns) or 'none'}; expected it in Batch.columns"
            )
        columns = {name: flat(x_BS) for name, x_BS in rows.columns.items()}
        targets = Targets(flat(rows.targets_BS), weights, columns)
        positions, lengths = flat(taken(whole.positions(), spans)), whole.lengths(spans)
        attend = self.execution.tokens.attend(count, tokens, whole.flat_bounds())
        most = 0
        if any(axis.parts for axis in self.plan.mesh.axes):
            most = rows.ids_BS.shape[1] * self.plan.most_rows
        return Part(
            flat(rows.ids_BS), positions, targets, rows.flat_bounds(), rows.noise, lengths, attend,
            most, 0 if self.execution.axis else count,
        )  # fmt: skip

    def begin(
        self,
        part: Part,
        factor: float,
        spill_of: SpillOf = no_spill,
        held: Collection[int] | None = None,
        way: Way | None = None,
    ) -> ChainWalk:
        model = self.model
        context = self._context(part, factor)
        head, rows = self._head(factor, part.ids_T.shape[0]), self.rows
        runner = runner_of(self.plan)
        ends: Edges | None = None
        if rows is not None:
            assert way is not None, "rows are of microbatches that have numbers"
            here = (held is None or end in held for end in (way.first, way.last))
            rows.begin(way.microbatch, part.ids_T, part.targets, head, *here)
            ends = Edges(rows, way)

        def prologue(given: Tensor) -> Tensor:
            if rows is not None:
                return model.prologue.enter(given, context)
            if runner is not None:
                return runner.enter(context, entered)
            return entered(slice(None), context)

        def entered(here: slice, its: Context) -> Tensor:
            return model.prologue(part.ids_T[here], its)  # type: ignore[no-any-return]

        def loss_of(x_CD: Tensor, here: slice, its: Context, end: Any = model.epilogue) -> Tensor:
            h_CD, (weight, bias) = end(x_CD, its), end.head.fused()
            targets = part.targets.at(here)
            if DRAWN in targets.columns:
                return _loss_of_drawn(h_CD, weight, bias, targets, head)
            return chunked_loss(h_CD, weight, bias, targets, head)

        def loss(x_TD: Tensor) -> Tensor:
            if rows is not None:
                return model.epilogue(x_TD, context)  # type: ignore[no-any-return]
            if runner is not None:
                return runner.loss(context, x_TD, loss_of)
            return loss_of(x_TD, slice(None), context)

        def inner(segment: int, module: nn.Module) -> Callable[[Tensor], Tensor]:
            if segment in self.heads:
                return lambda x_TD: loss_of(x_TD, slice(None), context, module)
            return lambda x_TD: module(x_TD, context)

        every = [prologue, *(inner(i, m) for i, m in enumerate(self.blocks, 1)), loss]

        def record(here: Stage, x: Tensor, spill: Spill | None) -> StageRecord:
            if runner is not None and here.whole:
                return runner.record(self.blocks[here.first - 1 : here.last - 1], context, x, spill)
            return Record(partial(through, every[here.first : here.last]), [x], spill)

        return ChainWalk(
            record, self.plan, self._trainable_from, part.ids_T, spill_of, ends, self.heads
        )

    def _context(self, part: Part, factor: float) -> Context:
        check_blocks(self.model.config, self.plan, part.noise is not None)
        context = self.model.context(
            part.positions_T, part.bounds, part.attend, self.execution.dispatch, part.lengths,
            part.noise,
        )  # fmt: skip
        whole = sum(part.lengths or ()) == part.bounds[-1]
        return replace(context, most=part.most, factor=factor if whole else None, rows=part.rows)

    def _head(self, factor: float, tokens: int) -> Head:
        options, loss = (self.options, self.loss) if torch.is_grad_enabled() else (PLAIN, None)
        epilogue = self.model.epilogue
        sink: GradSink | None = None if self._sink is None else self._sink.now
        chunk = self.plan.loss_chunk or tokens
        scale, softcap = epilogue.logit_scale, epilogue.softcap
        return Head(factor, chunk, sink, scale, softcap, options, epilogue.vocabulary, loss)


def _loss_of_drawn(
    h_CD: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, head: Head
) -> Tensor:
    """The plain cross-entropy of labels that the model draws for itself."""
    from outsize.kernels.drawing import drawn

    targets, head = (
        drawn(h_CD, weight, bias, targets, head),
        replace(head, options=PLAIN, loss=None),
    )
    return chunked_loss(h_CD, weight, bias, targets, head)


def _check_sided(plan: Plan) -> None:
    """OutsizeError for a plan in which one Context does not go through all blocks."""
    why = "mesh.pipeline" if plan.mesh.pipeline > 1 else None
    if runner_of(plan) is not None:
        why = next(one.name for one, _ in plan.settings.every() if one.name in RUNNERS.names())
    if why is not None:
        raise OutsizeError(
            f"plan: {why} is set, and the adapter's side network takes what all blocks took of a"
            " whole microbatch on one worker; leave it out, or use another adapter"
        )


def through(functions: Sequence[Callable[[Tensor], Tensor]], given: list[Tensor]) -> list[Tensor]:
    (x,) = given
    for function in functions:
        x = function(x)
    return [x]


@dataclass(frozen=True)
class Edges:
    """Where a walk comes from and leads to, where all workers share the first and the last layer:
    its embedding comes from them, and they make its losses."""

    rows: Rows
    way: Way

    def enter(self, stage: int) -> Tensor | None:
        """The input of a first stage."""
        first = stage == self.way.first
        return self.rows.take(State.ACTIVATIONS, self.way.microbatch) if first else None

    def leave(self, stage: int, out: Tensor) -> None:
        """A last stage's output."""
        if stage == self.way.last:
            self.rows.give(State.ACTIVATIONS, self.way.microbatch, out)

    def back(self, stage: int) -> Tensor | None:
        """The gradient of a last stage's output."""
        last = stage == self.way.last
        return self.rows.take(self.rows.back, self.way.microbatch) if last else None

    def gone(self, stage: int, gradient: Tensor | None) -> None:
        """The gradient of a first stage's input."""
        if stage == self.way.first and gradient is not None:
            self.rows.give(State.GRADIENTS, self.way.microbatch, gradient)


class ChainWalk:
    """A walk along stages from one tensor to the next. record: how a stage runs on its input, and
    what takes what it keeps. ends: what is before the first stage and behind the last, where they
    are not the ids and the loss. heads: segments that give a loss by the way, in training: what
    they are given goes on behind them, and no gradient comes back."""

    def __init__(
        self,
        record: Callable[[Stage, Tensor, Spill | None], StageRecord],
        plan: Plan,
        trainable_from: int,
        start: Tensor,
        spill_of: SpillOf = no_spill,
        ends: Edges | None = None,
        heads: Collection[int] = (),
    ) -> None:
        self._spill_of, self._ends, self._heads = spill_of, ends, heads
        self._record, self._plan, self._trainable_from = record, plan, trainable_from
        self._carry: Tensor | None = start
        self._gradient: list[Tensor | None] = [None]
        self._records: dict[int, StageRecord] = {}
        self.loss: Tensor | None = None

    def forward(self, stage: int) -> None:
        here, ends = self._plan.stages[stage], self._ends
        train = torch.is_grad_enabled() and here.last > self._trainable_from
        aside = here.first in self._heads
        if aside and not train:
            return
        entered = None if ends is None else ends.enter(stage)
        carry, self._carry = self._carry if entered is None else entered, None
        assert carry is not None
        if aside:
            self._carry = carry
        del entered
        spill = self._spill_of(stage) if train else None
        fed = here.first > self._trainable_from and here.first - 1 not in self._heads
        x = input_leaf(carry, fed or (ends is not None and stage == ends.way.first))
        record = self._record(here, x, spill)
        del carry, x
        (out,) = record.forward(train and not here.whole)
        if train:
            self._records[stage] = record
        if ends is not None:
            ends.leave(stage, out)
        if ends is not None and stage == ends.way.last:
            return
        if aside or stage == len(self._plan.stages) - 1:
            self.loss = out
            self._gradient = [torch.ones_like(out)] if train else []
        else:
            self._carry = out

    def take(self, stage: int) -> list[Tensor]:
        """What a stage has given, for the worker that has the next one."""
        carry, self._carry = self._carry, None
        assert carry is not None
        return [carry]

    def put(self, stage: int, tensors: list[Tensor]) -> None:
        """What a stage has given on another worker."""
        (self._carry,) = tensors

    def take_gradient(self, stage: int) -> list[Tensor | None]:
        """The gradient of what a stage has given, for the worker that has it."""
        gradient, self._gradient = self._gradient, []
        return gradient

    def put_gradient(self, stage: int, gradients: list[Tensor | None]) -> None:
        """The gradient of what a stage has given, from the worker that has the next one."""
        self._gradient = gradients

    def recompute(self, stage: int) -> None:
        self._records[stage].again()

    def backward(self, stage: int) -> None:
        gradient, self._gradient = self._gradient, []
        back = None if self._ends is None else self._ends.back(stage)
        if back is not None:
            gradient = [back]
        record = self._records.pop(stage)
        self._gradient = record.backward(gradient)
        for x in record.inputs:  # which gradients of weights that are made later may keep
            x.grad = None
        if self._ends is not None:
            self._ends.gone(stage, self._gradient[0])
