"""How a technique runs stages of blocks that are recomputed whole: the joint for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from outsize.errors import OutsizeError
from outsize.models.config import DecoderConfig
from outsize.models.seams import Context
from outsize.models.wiring import AnyBlock
from outsize.plan import Plan
from outsize.plan.approximate import PARTIAL
from outsize.registry import Registry
from outsize.runtime.again import Call
from outsize.runtime.spill import Spill


class StageRecord(Protocol):
    """What a stage keeps between its passes; as a Record."""

    inputs: list[Tensor]

    def forward(self, keep: bool) -> list[Tensor]: ...

    def again(self) -> None: ...

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]: ...


class StageRunner(Protocol):
    """How a technique runs stages of blocks that are recomputed whole, and the loss."""

    def check(self, config: DecoderConfig, plan: Plan, noise: bool) -> None:
        """OutsizeError where the blocks of a model cannot run like that. noise: with dropout."""

    def enter(self, context: Context, run: Callable[[slice, Context], Tensor]) -> Tensor:
        """The prologue's output: run(tokens, their Context) of all tokens."""

    def record(
        self, blocks: Sequence[AnyBlock], context: Context, x_TD: Tensor, spill: Spill | None
    ) -> StageRecord:
        """Of a stage of these blocks; spill: where its input goes, if it leaves the device."""

    def loss(
        self, context: Context, x_TD: Tensor, run: Callable[[Tensor, slice, Context], Tensor]
    ) -> Tensor:
        """The sum of run(x_CD, tokens, their Context) over all tokens."""

    def call(
        self, path: str, module: nn.Module, call: Call, leaves: list[Tensor], spill: Spill | None
    ) -> StageRecord:
        """Of a call of an adopted module's block."""


# By the setting of a plan that asks for it: the runner of its value.
RUNNERS: Registry[Callable[[int], StageRunner]] = Registry("stage runner")


def runner_of(plan: Plan) -> StageRunner | None:
    """Of the setting that has one, None where stages run as they are."""
    found = ((RUNNERS.find(one.name), value) for one, value in plan.settings.every())
    return next((make(value) for make, value in found if make is not None), None)


def check_blocks(config: DecoderConfig, plan: Plan, noise: bool) -> None:
    """Refuse what the plan's way to run blocks cannot have. noise: dropout is wanted."""
    if (runner := runner_of(plan)) is not None:
        runner.check(config, plan, noise)


def check_paths(config: DecoderConfig, plan: Plan) -> None:
    """Refuse microbatches that leave stages out where these do not give what they take."""
    if PARTIAL not in plan.approximate or config.wiring is None:
        return
    # Not above: whoever generates needs no schedules of pipelines.
    from outsize.schedule.pipelined import bounds_of, coarse_of

    bounds = bounds_of(plan, coarse_of(plan).placement.stages)
    lasts = [plan.stages[end - 1].last - 2 for end in bounds[1:-1]]  # the first segment is no block
    every = [config.wiring.width(layer, 1) for layer in (*lasts, len(config.layers) - 1)]
    if len(set(every)) > 1:
        numbers = ", ".join(f"{x:g}" for x in every)
        raise OutsizeError(
            f"plan: pipeline.schedule is {plan.pipeline.schedule!r}, by which microbatches leave"
            f" stages out, but with {config.wiring.key} these give {numbers} times the"
            " model's features: set pipeline.cuts so that the first stage has every block that"
            " gives others, or choose another schedule"
        )
