"""Generation through the same runtime: every step plays a PREFILL or DECODE schedule.

T tokens of the step laid flat, N sequences, D hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from outsize.models.decoder import Decoder
from outsize.models.seams import Context, Past
from outsize.runtime.engine import Engine, Loaded
from outsize.runtime.handlers.tokens import Tokens
from outsize.runtime.points import Points
from outsize.runtime.watch import Watch
from outsize.schedule import Kind, compile_tokens, prove


class TokenPlayer:
    """A step of generation through a decoder, a stage a segment; see outsize.decode.Forward."""

    def __init__(self, model: Decoder) -> None:
        self.model, stages = model, len(model.blocks) + 2
        self._tokens = Tokens(partial(apply_stage, model))
        self._engine = Engine([self._tokens], next(model.parameters()).device, Watch())
        own = tuple((s,) for s in range(stages))
        self._lists = dict[Kind, Loaded]()
        for kind in (Kind.PREFILL, Kind.DECODE):
            schedule = compile_tokens(stages, kind)
            prove(schedule)
            self._lists[kind] = self._engine.load(schedule, Points(schedule, own))

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, bounds: tuple[int, ...], past: Past
    ) -> Tensor:
        """logits_NV of the last token of each sequence."""
        single = all(stop - start == 1 for start, stop in pairwise(bounds))
        context = self.model.context(positions_T, bounds, past=past)
        self._tokens.ready(ids_T, context)
        self._engine.play(self._lists[Kind.DECODE if single else Kind.PREFILL], 0.0)
        return self._tokens.taken()


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
