"""The output layer in two passes, its vocabulary cut over workers that meet in between.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. Every worker has
rows of the head and the hidden states of all tokens. In S it makes its logits z, and of each token
their largest, m, and the sum of exp(z - m). Then these few numbers are exchanged, which gives a
token's loss and the factor by which exp(z - m) is the gradient of the log of the whole sum. In T
follow the gradients of the weights.

The gradient of the hidden states is a sum over the workers. Its factor goes through the product
with the weights, token by token, so the product can be made in T (variant 1), or already in S with
exp(z - m) in the gradient's place and be multiplied by the factor afterwards (variant 2, `early`):
then nobody waits for T. What is not times the factor, the pull of the target and of smoothing, is
known in S.

In chunks of the tokens S leaves no logits for T, which makes them again, chunk by chunk: one
product more, and no more logits at once than a chunk has.

T tokens, C tokens of a chunk, D hidden, V vocabulary (here).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outsize.kernels import product
from outsize.kernels.entropy import (
    IGNORE,
    Targets,
    Vocabulary,
    check,
    losses,
    numbers,
    together,
    weighed,
)
from outsize.kernels.loss import Head, logits, soften, wide


@dataclass(frozen=True)
class Part:
    """A worker's rows of the head. head: with its vocabulary and a sink."""

    weight_VD: Tensor
    bias_V: Tensor | None
    head: Head

    @property
    def vocabulary(self) -> Vocabulary:
        """Which rows they are, and who has the others."""
        assert self.head.vocabulary is not None, "a part of a head knows which it is"
        return self.head.vocabulary

    @property
    def trained(self) -> bool:
        """Whether anything of it is."""
        bias = self.bias_V is not None and self.bias_V.requires_grad
        return self.weight_VD.requires_grad or bias


@dataclass(frozen=True)
class Logits:
    """Of a chunk of tokens. z: as they are used. slope: of these by what the product gave, one
    number where there is no cap. index: of the target here, 0 where it is elsewhere; here: 1 for
    tokens whose target is here."""

    z_CV: Tensor
    slope_CV: Tensor | float
    index_C1: Tensor
    here_C: Tensor


@dataclass(frozen=True)
class Scored:
    """What S leaves for T of one microbatch.

    h: its hidden states. made: its logits, exp(z - own top) in the place of z; None where T makes
    them again, or has no use for them. numbers: what is exchanged. soft, pull: the gradient of h
    (T, D) up to each token's factor, and the rest of it up to its weight; None in variant 1.
    """

    h_TD: Tensor
    targets: Targets
    numbers_XT: Tensor
    made: Logits | None = None
    soft_TD: Tensor | None = None
    pull_TD: Tensor | None = None


@dataclass(frozen=True)
class Agreed:
    """What the exchange gives. loss: the sum over the tokens, times head.factor. factor: of each
    token, for exp. weight: what each token's gradient is times, 0 where it has no target."""

    loss: Tensor
    factor_T: Tensor
    weight_T: Tensor


@torch.no_grad()
def score(h_TD: Tensor, targets: Targets, part: Part, early: bool) -> Scored:
    """S. targets: of the whole vocabulary. early: variant 2."""
    check(targets.ids_T, part.vocabulary.size)
    chunks = _chunks(h_TD.shape[0], part.head.chunk)
    if len(chunks) == 1:
        found = _scored(h_TD, targets, part, early)
        return found if part.trained or not early else replace(found, made=None)
    each = [
        replace(_scored(h_TD[here], targets.at(here), part, early), made=None) for here in chunks
    ]
    numbers_XT = torch.cat([c.numbers_XT for c in each], 1)
    if not early:
        return Scored(h_TD, targets, numbers_XT)
    soft_TD = torch.cat([c.soft_TD for c in each if c.soft_TD is not None])
    pull_TD = torch.cat([c.pull_TD for c in each if c.pull_TD is not None])
    return Scored(h_TD, targets, numbers_XT, None, soft_TD, pull_TD)


def _chunks(tokens: int, size: int) -> list[slice]:
    """Those whose logits exist at once, chunk by chunk."""
    size = min(size, tokens) or 1
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scored(h_CD: Tensor, targets: Targets, part: Part, early: bool) -> Scored:
    """S of a chunk."""
    made = _logits(h_CD, targets.ids_T, part)
    smooth = part.head.options.label_smoothing > 0.0
    numbers_XC = numbers(made.z_CV, made.index_C1, made.here_C, smooth)
    if not early:
        return Scored(h_CD, targets, numbers_XC, made)
    soft_CV = (made.z_CV * made.slope_CV).to(h_CD.dtype)
    soft_CD = product.product(soft_CV, part.weight_VD).to(made.z_CV.dtype)
    return Scored(h_CD, targets, numbers_XC, made, soft_CD, _pull(made, part))


def _logits(h_CD: Tensor, targets_C: Tensor, part: Part) -> Logits:
    """The logits of a chunk that are here."""
    head, (first, last) = part.head, part.vocabulary.span
    z_CV = h_CD.new_empty(h_CD.shape[0], last - first, dtype=wide(h_CD.dtype))
    logits(h_CD, part.weight_VD, part.bias_V, z_CV)
    tanh_CV = soften(z_CV, head.scale, head.softcap)
    slope_CV: Tensor | float = head.scale
    if tanh_CV is not None:
        slope_CV = tanh_CV.square_().neg_().add_(1).mul_(head.scale)
    here_C = (targets_C != IGNORE) & (targets_C >= first) & (targets_C < last)
    index_C1 = (targets_C - first).masked_fill(~here_C, 0).unsqueeze(1)
    return Logits(z_CV, slope_CV, index_C1, here_C.to(z_CV.dtype))


def _pull(made: Logits, part: Part) -> Tensor:
    """The gradient of h, less what is times a token's factor; up to each token's weight."""
    head, slope_CV, dtype = part.head, made.slope_CV, made.z_CV.dtype
    smooth = head.options.label_smoothing
    here_C = made.here_C * (-head.factor * (1 - smooth))
    if isinstance(slope_CV, Tensor):
        here_C = here_C * slope_CV.gather(1, made.index_C1).squeeze(1)
    else:
        here_C = here_C * slope_CV
    pull_CD = part.weight_VD[made.index_C1.squeeze(1)].to(dtype) * here_C.unsqueeze(1)
    if smooth:
        if isinstance(slope_CV, Tensor):
            even_CD = product.product(slope_CV.to(part.weight_VD.dtype), part.weight_VD).to(dtype)
        else:
            even_CD = part.weight_VD.to(dtype).sum(0) * slope_CV
        pull_CD -= (head.factor * smooth / part.vocabulary.size) * even_CD
    return pull_CD


@torch.no_grad()
def agree(scored: Scored, part: Part) -> Agreed:
    """The exchange of the sums: all workers call it in one order. The loss is the same on all."""
    seen = together(part.vocabulary, scored.numbers_XT)
    losses_T, slope_T = losses(seen, part.head.options)
    # A pass without gradients has a plain head: see runtime/native.py.
    losses_T, weight_T = weighed(losses_T, scored.targets, part.head.loss)
    factor = part.head.factor
    return Agreed(losses_T.sum() * factor, slope_T * weight_T * factor, weight_T)


@torch.no_grad()
def early_gradient(scored: Scored, agreed: Agreed) -> Tensor:
    """This worker's summand of the gradient of h (T, D), where S was early: in the memory of what
    S has made, and in the precision of the logits."""
    assert scored.soft_TD is not None and scored.pull_TD is not None
    soft_TD = scored.soft_TD.mul_(agreed.factor_T.unsqueeze(1))
    return soft_TD.addcmul_(scored.pull_TD, agreed.weight_T.unsqueeze(1))


@torch.no_grad()
def settle(scored: Scored, agreed: Agreed, part: Part) -> Tensor | None:
    """T. Gradients of weight and bias go to head.sink; gives this worker's summand of the gradient
    of h (T, D), or None where S was early. What was scored is used up."""
    early = scored.soft_TD is not None
    if early and not part.trained:
        return None
    chunks = _chunks(scored.h_TD.shape[0], part.head.chunk)
    given = [g for here in chunks if (g := _settled(scored, agreed, part, here)) is not None]
    if early:
        return None
    return given[0] if len(given) == 1 else torch.cat(given)


def _settled(scored: Scored, agreed: Agreed, part: Part, here: slice) -> Tensor | None:
    """T of a chunk."""
    h_CD, made = scored.h_TD[here], scored.made
    if made is None:
        made = _logits(h_CD, scored.targets.ids_T[here], part)
        made.z_CV.sub_(scored.numbers_XT[0, here].unsqueeze(1)).exp_()
    g_CV = _gradient(made, agreed.factor_T[here], agreed.weight_T[here], part).to(h_CD.dtype)
    part.head.accumulate(part.weight_VD, part.bias_V, g_CV, h_CD)
    return None if scored.soft_TD is not None else product.product(g_CV, part.weight_VD)


def _gradient(made: Logits, factor_C: Tensor, weight_C: Tensor, part: Part) -> Tensor:
    """Of what the product gave, in the memory of z, which is exp(z - own top)."""
    head, z_CV = part.head, made.z_CV
    smooth = head.options.label_smoothing
    z_CV.mul_(factor_C.unsqueeze(1))
    pull_C1 = (made.here_C * weight_C * (-head.factor * (1 - smooth))).unsqueeze(1)
    z_CV.scatter_add_(1, made.index_C1, pull_C1)
    if smooth:
        z_CV.sub_((weight_C * (head.factor * smooth / part.vocabulary.size)).unsqueeze(1))
    return z_CV.mul_(made.slope_CV)
