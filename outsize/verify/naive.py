"""What a plain run computes in its own, simple way: norms, rotary embeddings, gates, dropout,
attention, recurrences, experts and the loss.

No chunk, no tile, no kernel of this project: all scores of a document, every expert on the tokens
that chose it, whole logits, and autograd for the rest.

T tokens laid flat, D hidden, V vocabulary, H query heads, G key-value heads, K head size, W value
size, J experts of a token, S tokens of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from outsize.data import IGNORE, Batch
from outsize.kernels.entropy import LossOptions
from outsize.kernels.gate import Activation
from outsize.models.attention import Attention, LatentAttention
from outsize.models.decoder import Decoder
from outsize.models.dropout import Noise
from outsize.models.experts import Experts
from outsize.models.linear import Linear
from outsize.models.mlp import MLP
from outsize.models.norm import Norm, Scaled
from outsize.models.random import bits
from outsize.models.seams import AttendSpec, ExpertSet, Recurrence, StateSpec, Tensors
from outsize.plan import Plan
from outsize.plan.approximate import PARTIAL
from outsize.schedule.pipelined import pipelining_of


def simple(model: Decoder) -> Decoder:
    """The same model, whose modules compute with PyTorch's operators alone."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.run = _normed
        elif isinstance(module, MLP):
            module.gating = _gated
        elif isinstance(module, (Attention, LatentAttention)):
            module.rotate = _rotated
        elif isinstance(module, Linear) and module.coded is not None:
            module.product = _by_weight
    return model


def _by_weight(one: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """By the whole weight that codes stand for."""
    weight = one.decoded(0, one.sizes[0], x.dtype) * 1  # a number that is rounded, as results are
    y = x @ weight.T
    return y if bias is None else y + bias


def _normed(norm: Scaled, x: Tensor) -> Tensor:
    wide, facts = _wide(x), norm.facts
    if facts.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide / (wide.square().mean(-1, keepdim=True) + facts.eps).sqrt()
    if norm.weight is not None:
        y = y * (_wide(norm.weight) + (0.0 if facts.kind == "layer" else 1.0 - facts.unit))
    return (y if norm.bias is None else y + _wide(norm.bias)).to(x.dtype)


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return activation.forward(gate) * up


def _rotated(x_THK: Tensor, table: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    cos_T1P, sin_T1P = (x.unsqueeze(1) for x in table)
    pairs, wide = cos_T1P.shape[-1], _wide(x_THK)
    turned, rest = wide[..., : 2 * pairs], wide[..., 2 * pairs :]
    dim = -1 if interleaved else -2
    a, b = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(dim)
    both = torch.stack((a * cos_T1P - b * sin_T1P, a * sin_T1P + b * cos_T1P), dim)
    return torch.cat((both.flatten(-2), rest), -1).to(x_THK.dtype)


class Dropped(Noise):
    """Dropout of a whole step with a mask that is drawn in one piece: of element i of a token 16
    bits, the i-th of the token's own words of 64."""

    def __call__(self, x_TD: Tensor, name: str) -> Tensor:
        tokens, features = x_TD.shape
        words, dropped = -(-features // 4), round(self.rate * 65536)
        last = (self.first + tokens) * words
        drawn = bits(self.seed, f"dropout {self.step} {name}", 0, last)[self.first * words :]
        places = torch.from_numpy(drawn.astype("<u8").view("<u2").astype("int64"))
        kept_TD = places.view(tokens, 4 * words)[:, :features] >= dropped
        return x_TD * kept_TD.to(x_TD.dtype) * (65536 / (65536 - dropped))


def dropped(noise: Noise | None) -> Noise | None:
    """The same, in the open."""
    return None if noise is None else Dropped(noise.rate, noise.seed, noise.step, noise.first)


def attend(
    q_THK: Tensor, k_TGK: Tensor, v_TGW: Tensor, bounds: tuple[int, ...], spec: AttendSpec
) -> Tensor:
    """o_THW: softmax of masked scores, document by document."""
    assert spec.plain, "a plain run attends to what is before"
    # One split, not a slice a document: the gradient of a slice is as large as what it is cut from.
    lengths = [b - a for a, b in pairwise(bounds) if b > a]
    if not lengths:
        return torch.cat((v_TGW[:0],) * q_THK.shape[1], 1)
    parts = zip(q_THK.split(lengths), k_TGK.split(lengths), v_TGW.split(lengths), strict=True)
    return torch.cat([_document(q_SHK, k_SGK, v_SGW, spec) for q_SHK, k_SGK, v_SGW in parts])


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
        found, tokens = [], list(zip(*(x.split(1) for x in inputs), strict=True))
        for first, last in pairwise(bounds):
            state = tuple(torch.zeros(1, *one.shape, dtype=one.dtype) for one in states)
            for token in tokens[first:last]:
                y, state = recurrence.step(token, state)
                found.append(y)
        return torch.cat(found)

    def keep(self, left: Tensors) -> None:
        raise AssertionError("a plain run has no chunks")


def dispatch(x_TD: Tensor, chosen_TJ: Tensor, weight_TJ: Tensor, experts: ExpertSet) -> Tensor:
    """y_TD: every expert in turn, on the tokens that chose it."""
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, weight_TJ.dtype))
    for index in range(experts.count):
        tokens, place = (chosen_TJ == index).nonzero(as_tuple=True)
        own_ND = _expert(experts, index, x_TD[tokens])
        y_TD = y_TD.index_add(0, tokens, own_ND * weight_TJ[tokens, place].unsqueeze(1))
    return y_TD.to(x_TD.dtype)


def _expert(experts: ExpertSet, index: int, x_ND: Tensor) -> Tensor:
    if not isinstance(experts, Experts):
        return experts(x_ND, [len(x_ND) * (e == index) for e in range(experts.count)])
    gate, up, down = (w[index] for w in (experts.gate, experts.up, experts.down))
    return (experts.activation.forward(x_ND @ gate.T) * (x_ND @ up.T)) @ down.T


def logits_of(
    model: Decoder,
    ids_T: Tensor,
    positions_T: Tensor,
    bounds: tuple[int, ...],
    noise: Noise | None = None,
    segments: Sequence[int] | None = None,
    factor: float = 0.0,
) -> Tensor:
    """logits_TV of documents that `bounds` cut, at least float32. segments: what they go through,
    in order, where not through all. factor: as a Context has it."""
    context = model.context(
        positions_T, bounds, attend, dispatch, noise=dropped(noise), carry=TokenByToken()
    )
    context = replace(context, factor=factor)
    if segments is None:
        h_TD = model.hidden(ids_T, context)
    else:
        every = [model.prologue, *model.blocks, model.epilogue]
        h_TD = ids_T
        for segment in segments:
            h_TD = every[segment](h_TD, context)
    return _wide(model.epilogue.logits(h_TD))


def loss_of(
    model: Decoder, batch: Batch, options: LossOptions, segments: Sequence[int] | None = None
) -> tuple[Tensor, float]:
    """Sum of the losses of a batch, each times its weight, and the sum of these weights. segments:
    as of logits_of."""
    ids_T, positions_T = batch.ids_BS.reshape(-1), batch.positions().reshape(-1)
    bounds, factor = batch.flat_bounds(), 1 / max(batch.weight(), 1)
    logits_TV = logits_of(model, ids_T, positions_T, bounds, batch.noise, segments, factor)
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
