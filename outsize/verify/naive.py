"""What a plain run computes in its own, simple way: attention, recurrences, experts and the loss.

No chunk, no tile, no kernel of this project: all scores of a document, every expert on the tokens
that chose it, whole logits, and autograd for the rest.

T tokens laid flat, D hidden, V vocabulary, H query heads, G key-value heads, K head size, W value
size, J experts of a token, S tokens of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.data import IGNORE, Batch
from outsize.kernels.entropy import LossOptions
from outsize.models.decoder import Decoder
from outsize.models.experts import Experts
from outsize.models.seams import AttendSpec, ExpertSet, Recurrence, StateSpec, Tensors
from outsize.plan import Plan
from outsize.plan.approximate import PARTIAL
from outsize.schedule.pipelined import pipelining_of


def attend(
    q_THK: Tensor, k_TGK: Tensor, v_TGW: Tensor, bounds: tuple[int, ...], spec: AttendSpec
) -> Tensor:
    """o_THW: softmax of masked scores, document by document."""
    assert spec.plain, "a plain run attends to what is before"
    found = [
        _document(q_THK[a:b], k_TGK[a:b], v_TGW[a:b], spec) for a, b in pairwise(bounds) if b > a
    ]
    return torch.cat(found) if found else torch.cat((v_TGW[:0],) * q_THK.shape[1], 1)


def _document(q_SHK: Tensor, k_SGK: Tensor, v_SGW: Tensor, spec: AttendSpec) -> Tensor:
    repeat = q_SHK.shape[1] // k_SGK.shape[1]
    q_HSK = q_SHK.transpose(0, 1)
    k_HSK, v_HSW = (x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (k_SGK, v_SGW))
    scores = _wide(q_HSK @ k_HSK.mT) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    places = torch.arange(len(q_SHK))
    behind = places[:, None] - places[None, :]
    seen = (behind >= 0) & (behind < (spec.window or len(q_SHK)))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights.to(v_HSW.dtype) @ v_HSW).transpose(0, 1)


class TokenByToken:
    """Recurrent states go through documents a token at a time, in the open."""

    def run(
        self,
        layer: int,
        states: tuple[StateSpec, ...],
        recurrence: Recurrence,
        inputs: Tensors,
        bounds: tuple[int, ...],
    ) -> Tensor:
        found = []
        for first, last in pairwise(bounds):
            state = tuple(torch.zeros(1, *one.shape, dtype=one.dtype) for one in states)
            for token in range(first, last):
                y, state = recurrence.step(tuple(x[token : token + 1] for x in inputs), state)
                found.append(y)
        return torch.cat(found)

    def keep(self, left: Tensors) -> None:
        raise AssertionError("a plain run has no chunks")


def dispatch(x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: ExpertSet) -> Tensor:
    """y_TD: every expert in turn, on the tokens that chose it."""
    assert isinstance(experts, Experts)
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, weight_TJ.dtype))
    for index in range(experts.count):
        tokens, place = (chosen_TJ == index).nonzero(as_tuple=True)
        gate, up, down = (w[index] for w in (experts.gate, experts.up, experts.down))
        inner = experts.activation.forward(x_TD[tokens] @ gate.T) * (x_TD[tokens] @ up.T)
        y_TD = y_TD.index_add(0, tokens, (inner @ down.T) * weight_TJ[tokens, place].unsqueeze(1))
    return y_TD.to(x_TD.dtype)


def loss_of(
    model: Decoder, batch: Batch, options: LossOptions, segments: Sequence[int] | None = None
) -> tuple[Tensor, float]:
    """Sum of the losses of a batch, each times its weight, and the sum of these weights. segments:
    what it goes through, in order, where not through all."""
    context = model.context(
        batch.positions().reshape(-1),
        batch.flat_bounds(),
        attend,
        dispatch,
        noise=batch.noise,
        carry=TokenByToken(),
    )
    ids_T = batch.ids_BS.reshape(-1)
    if segments is None:
        h_TD = model.hidden(ids_T, context)
    else:
        every = [model.prologue, *model.blocks, model.epilogue]
        h_TD = ids_T
        for segment in segments:
            h_TD = every[segment](h_TD, context)
    logits_TV = _wide(model.epilogue.logits(h_TD))
    targets_T = batch.targets_BS.reshape(-1)
    losses_T = F.cross_entropy(
        logits_TV, targets_T, ignore_index=IGNORE, label_smoothing=options.label_smoothing,
        reduction="none",
    )  # fmt: skip
    if options.z_loss:
        squares_T = logits_TV.logsumexp(-1).square()
        losses_T = losses_T + options.z_loss * squares_T * (targets_T != IGNORE)
    if batch.weights_BS is not None:
        losses_T = losses_T * batch.weights_BS.reshape(-1)
    return losses_T.sum(), batch.weight()


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Walk:
    """Rows [start, stop) of a step; segments: theirs, in order."""

    start: int
    stop: int
    segments: tuple[int, ...]


def walks_of(plan: Plan) -> tuple[Walk, ...]:
    """Of all rows of a step; none where all of them go through every segment. Which rows leave some
    out is the schedule's to say (SkipPipe, outsize/schedule/pipelines/skip_pipe.py); read here, so
    that the plain run goes the same ways in a simple loop."""
    if PARTIAL not in plan.approximate:
        return ()
    stages = plan.stages
    paths = pipelining_of(plan, 0, [(stage,) for stage in range(len(stages))]).paths
    found = []
    for place in range(plan.mesh.rows):
        first, _ = plan.rows_at(place)
        for microbatch, path in enumerate(paths):
            start, stop = plan.rows_of(microbatch, place)
            segments = (i for s in path for i in range(stages[s].first, stages[s].last))
            found.append(Walk(first + start, first + stop, tuple(segments)))
    return tuple(found)


@dataclass(frozen=True)
class NativeLoss:
    """A decoder's loss over a whole step. model: the decoder; options: of the loss; walks: of all
    rows, where they do not go through all of it."""

    model: Decoder
    options: LossOptions
    walks: tuple[Walk, ...] = ()

    def __call__(self, batch: Batch) -> tuple[Tensor, float]:
        if not self.walks:
            total, count = loss_of(self.model, batch, self.options)
            return total, float(count)
        rows = ((batch.rows(walk.start, walk.stop), walk.segments) for walk in self.walks)
        found = [loss_of(self.model, own, self.options, segments) for own, segments in rows]
        return torch.stack([total for total, _ in found]).sum(), batch.weight()
