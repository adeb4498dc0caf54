"""Blocks and the epilogue in chunks of the sequence, forward and back, exactly.

Luo et al., "StreamBP", 2025; Bekman et al., "Arctic Long Sequence Training", 2025. How a stage runs
is outsize/runtime/sequence.py. The planner takes chunks last, where a step fits in no other way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outsize.collectives.axes import Clash
from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.seams import Context
from outsize.models.wiring import AnyBlock
from outsize.plan import Pipelined, Plan
from outsize.plan.settings import PLAN_SETTINGS, PlanSetting
from outsize.runtime.native import RUNNERS
from outsize.runtime.sequence import ChunkRecord, chunked_sum
from outsize.runtime.spill import Spill
from outsize.schedule import Kind
from outsize.schedule.pipelines import Shape, named

NAME = "sequence_chunk"
LEAST = 64  # tokens: a tile of our attention
_FITS_ALL = Shape(4, 16)  # conditions of every schedule hold


@dataclass(frozen=True)
class InChunks:
    """Runs stages so many tokens at a time."""

    chunk: int

    def check_noise(self, config: DecoderConfig) -> None:
        """Rewired blocks drop what earlier ones gave: their masks would be other tokens'."""
        if config.rewired:
            raise OutsizeError(
                f"plan: {NAME} is {self.chunk} and the model, rewired as {config.rewired} says,"
                " trains with dropout, which do not go together: set one of them to 0"
            )

    def record(
        self, blocks: Sequence[AnyBlock], context: Context, x_TD: Tensor, spill: Spill | None
    ) -> ChunkRecord:
        return ChunkRecord(blocks, context, self.chunk, x_TD, spill)

    def loss(self, x_TD: Tensor, run: Callable[[Tensor, slice], Tensor]) -> Tensor:
        return chunked_sum(x_TD, run, self.chunk)


def tighter(plan: Plan) -> tuple[int, int]:
    """An eighth of a microbatch, then so few tokens that the rest of a step needs more."""
    tokens = plan.microbatch_rows * plan.sequence
    if tokens < 2 * LEAST:
        return 0, 0
    return max(LEAST, -(-tokens // 8)), max(LEAST, -(-tokens // 32))


@functools.cache
def _apart(line: Pipelined) -> bool:
    """Whether a pipeline's schedule takes the gradients of weights apart from those of inputs."""
    if line.orders:
        return any("W" in order for order in line.orders)
    workers = named(line.schedule, _FITS_ALL).schedule.workers
    return any(action.kind is Kind.BACKWARD_WEIGHT for actions in workers for action in actions)


RUNNERS.add(NAME, InChunks)
PLAN_SETTINGS.add(
    NAME,
    PlanSetting(
        NAME,
        "tokens in a block at once where blocks are recomputed whole, and in the epilogue; 0: all",
        (
            Clash(
                "and sequence_parallel is set: both cut tokens",
                lambda plan: plan.sequence_parallel,
                "set one of them to false or 0",
            ),
            Clash(
                "and the workers of an axis of the mesh have parts of each row, whose tokens it"
                " runs one after another",
                lambda plan: bool(plan.mesh.cutting("tokens")),
                "set it to 0, or that axis to 1",
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
        native="whose attention is not known apart from the rest of a block",
        recompute=("block",),
        tokens=True,
        sums=True,
        tighter=tighter,
        draws=(0, 0, 4, 7),
    ),
)
