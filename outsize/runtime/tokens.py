"""Generation through the same runtime: every step plays a PREFILL or DECODE schedule.

T tokens of the step laid flat, N sequences, D hidden, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from outsize.decode.cache import CachedAttend
from outsize.models.decoder import Decoder
from outsize.models.seams import Context
from outsize.schedule import Kind, compile_tokens, validate


class TokenPlayer:
    """A step of generation through a decoder, a stage a segment; see outsize.decode.Forward."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        stages = len(model.blocks) + 2
        self.schedules = {
            kind: compile_tokens(stages, kind) for kind in (Kind.PREFILL, Kind.DECODE)
        }
        for schedule in self.schedules.values():
            validate(schedule)

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], attend: CachedAttend
    ) -> Tensor:
        """logits_NV of the last token of each sequence."""
        single = all(stop - start == 1 for start, stop in pairwise(bounds))
        schedule = self.schedules[Kind.DECODE if single else Kind.PREFILL]
        context = self.model.context(positions_T, bounds, attend=attend, lengths=attend.lengths)
        carry = ids_T
        for action in schedule.workers[0]:
            carry = apply_stage(self.model, action.stage, carry, context)
        return carry


def apply_stage(
    model: Decoder, stage: int, carry: Tensor, context: Context, last: bool = True
) -> Tensor:
    """A stage's part of a step: ids_T through the prologue, x_TD through a block, and at the end
    the logits, of the last token of each sequence or, last=False, of every token."""
    if stage == 0:
        return model.prologue(carry, context)  # type: ignore[no-any-return]
    if stage <= len(model.blocks):
        return model.blocks[stage - 1](carry, context)  # type: ignore[no-any-return]
    if last:
        carry = carry[torch.tensor(context.bounds[1:], device=carry.device) - 1]
    return model.epilogue.logits(model.epilogue(carry, context))
