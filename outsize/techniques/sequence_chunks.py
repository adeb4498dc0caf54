"""Blocks and the epilogue in chunks of the sequence, forward and back, exactly.

Luo et al., "StreamBP", 2025; Bekman et al., "Arctic Long Sequence Training", 2025. How a stage runs
is outsize/runtime/sequence.py, of adopted modules outsize/runtime/adopted/chunks.py. The planner
takes chunks last, where a step fits in no other way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from outsize.collectives.axes import Clash
from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.seams import Context
from outsize.models.wiring import AnyBlock
from outsize.plan import Pipelined, Plan
from outsize.plan.settings import PLAN_SETTINGS, PlanSetting
from outsize.runtime.adopted.chunks import called
from outsize.runtime.again import Call
from outsize.runtime.runners import RUNNERS, StageRecord
from outsize.runtime.sequence import ChunkRecord, chunked_sum, pieces_of
from outsize.runtime.spill import Spill
from outsize.schedule import Kind
from outsize.schedule.pipelines import Shape, named

NAME = "sequence_chunk"
LEAST = 64  # tokens: a tile of our attention
_FITS_ALL = Shape(4, 16)  # conditions of every schedule hold


@dataclass(frozen=True)
class InChunks:
    """Runs stages so many tokens at a time. checked: see outsize/runtime/adopted/chunks.py."""

    chunk: int
    checked: set[tuple[str, bool]] = field(default_factory=set, compare=False)

    def check(self, config: DecoderConfig, plan: Plan, noise: bool) -> None:
        """Rewired blocks drop what earlier ones gave: their masks would be other tokens'. What they
        leave is summed over a tensor axis at their own input, not at their mixer's."""
        if config.rewired and plan.mesh.tensor > 1 and plan.mesh.cutting("tokens"):
            raise OutsizeError(
                f"plan: {NAME} is {self.chunk} and the model is rewired as {config.rewired} says,"
                f" while {plan.mesh.cutting('tokens')[0]} cuts its tokens and tensor its weights,"
                " which do not go together: set one of the axes to 1"
            )
        if config.rewired and noise:
            raise OutsizeError(
                f"plan: {NAME} is {self.chunk} and the model, rewired as {config.rewired} says,"
                " trains with dropout, which do not go together: set one of them to 0"
            )

    def enter(self, context: Context, run: Callable[[slice, Context], Tensor]) -> Tensor:
        tokens = context.bounds[-1]
        if context.between(tokens) == (0, tokens):
            return run(slice(0, tokens), context)
        every = [here.tokens for here in pieces_of(context, self.chunk)]
        return torch.cat([run(here, at(context, here)) for here in every])

    def record(
        self, blocks: Sequence[AnyBlock], context: Context, x_TD: Tensor, spill: Spill | None
    ) -> ChunkRecord:
        return ChunkRecord(blocks, context, self.chunk, x_TD, spill)

    def loss(
        self, context: Context, x_TD: Tensor, run: Callable[[Tensor, slice, Context], Tensor]
    ) -> Tensor:
        every = [here for here in pieces_of(context, self.chunk) if here.count]
        return chunked_sum(
            x_TD, lambda x_CD, here: run(x_CD, here.tokens, at(context, here.tokens)), every
        )

    def call(
        self, path: str, module: nn.Module, call: Call, leaves: list[Tensor], spill: Spill | None
    ) -> StageRecord:
        return called(path, module, call, leaves, self.chunk, spill, self.checked)


def at(context: Context, here: slice) -> Context:
    """Of a chunk, for what does not attend."""
    return context.at(here.start, here.stop, context.attend, context.carry)


def _whole(plan: Plan) -> bool:
    """Whether all blocks run in chunks."""
    return sum(s.last - s.first for s in plan.stages if s.whole) == plan.segments - 2


def tighter(plan: Plan) -> tuple[int, int]:
    """An eighth of a microbatch, then so few tokens that the rest of a step needs more."""
    workers = prod(plan.mesh[name] for name in plan.mesh.cutting("tokens"))
    tokens = plan.microbatch_rows * plan.sequence // workers
    if tokens < 2 * LEAST:
        return 0, 0
    return max(LEAST, -(-tokens // 8)), max(LEAST, -(-tokens // 32))


@functools.cache
def _apart(line: Pipelined) -> bool:
    """Whether a pipeline's schedule takes the gradients of weights apart from those of inputs."""
    if line.orders:
        return any("W" in order for order in line.orders)
    return _apart_by_name(line.schedule)


@functools.cache
def _apart_by_name(text: str) -> bool:
    """The same of a named one: every plan that a search looks at asks."""
    workers = named(text, _FITS_ALL).schedule.workers
    return any(action.kind is Kind.BACKWARD_WEIGHT for actions in workers for action in actions)


RUNNERS.add(NAME, InChunks)
PLAN_SETTINGS.add(
    NAME,
    PlanSetting(
        NAME,
        "tokens in a block at once where blocks are recomputed whole, and in the epilogue; 0: all",
        (
            Clash(
                "and sequence_parallel is set, while some blocks are not recomputed whole: they"
                " would have the tokens of a chunk apart",
                lambda plan: plan.sequence_parallel and not _whole(plan),
                "set recompute to [block], or sequence_parallel to false",
            ),
            Clash(
                "and sequence_parallel is set, while the vocabulary is cut over the pipeline, whose"
                " workers have no chunks of the embedding",
                lambda plan: plan.sequence_parallel and plan.pipeline.ends is not None,
                "set sequence_parallel to false, or leave the vocabulary whole",
            ),
            Clash(
                "and one axis of the mesh cuts the tokens of rows and another deals out experts,"
                " which all its workers ask equally often: they have not as many chunks",
                lambda plan: (
                    bool(plan.mesh.cutting("tokens")) and any(axis.parts for axis in plan.mesh.axes)
                ),
                "set it to 0, or one of the axes to 1",
            ),
            Clash(
                "and split_backward is set; weight gradients kept for later would hold every chunk",
                lambda plan: plan.split_backward,
                "set one of them to 0 or false",
            ),
            Clash(
                "and pipeline.schedule takes the gradients of weights later: they would hold every"
                " chunk",
                lambda plan: plan.mesh.pipeline > 1 and _apart(plan.pipeline),
                "set it to 0, or plan.pipeline to 1f1b",
            ),
            Clash(
                "but no stage has recompute [block]",
                lambda plan: not any(stage.whole for stage in plan.stages),
                "only blocks that are recomputed whole run in chunks of the sequence",
            ),
        ),
        touches=frozenset({"how a stage runs"}),
        recompute=("block",),
        tokens=True,
        sums=True,
        tighter=tighter,
        draws=(0, 0, 4, 7),
    ),
)
