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

T tokens, D hidden, V vocabulary (here).
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
    """A worker's rows of the head. head: with its vocabulary and a sink; its chunk is not used,
    since all tokens' logits wait for the exchange."""

    weight_VD: Tensor
    bias_V: Tensor | None
    head: Head

    @property
    def vocabulary(self) -> Vocabulary:
        """Which rows they are, and who has the others."""
        assert self.head.vocabulary is not None, "a part of a head knows which it is"
        return self.head.vocabulary


@dataclass(frozen=True)
class Scored:
    """What S leaves for T of one microbatch.

    h: its hidden states. exp: of logits less their largest here. slope: of the logits as they are
    used by what the product gave, one number where there is no cap. index: of the target here, 0
    where it is elsewhere; here: 1 for tokens whose target is here. numbers: what is exchanged.
    soft, pull: the gradient of h (T, D) up to each token's factor, and the rest of it up to its
    weight; None in variant 1.
    """

    h_TD: Tensor
    exp_TV: Tensor
    slope_TV: Tensor | float
    index_T1: Tensor
    here_T: Tensor
    targets: Targets
    numbers_XT: Tensor
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
    head, (first, last), targets_T = part.head, part.vocabulary.span, targets.ids_T
    check(targets_T, part.vocabulary.size)
    z_TV = h_TD.new_empty(h_TD.shape[0], last - first, dtype=wide(h_TD.dtype))
    logits(h_TD, part.weight_VD, part.bias_V, z_TV)
    tanh_TV = soften(z_TV, head.scale, head.softcap)
    slope_TV: Tensor | float = head.scale
    if tanh_TV is not None:
        slope_TV = tanh_TV.square_().neg_().add_(1).mul_(head.scale)
    here_T = (targets_T != IGNORE) & (targets_T >= first) & (targets_T < last)
    index_T1 = (targets_T - first).masked_fill(~here_T, 0).unsqueeze(1)
    numbers_XT = numbers(z_TV, index_T1, here_T, head.options.label_smoothing > 0.0)
    scored = Scored(h_TD, z_TV, slope_TV, index_T1, here_T.to(z_TV.dtype), targets, numbers_XT)
    if not early:
        return scored
    soft_TV = z_TV * slope_TV
    soft_TD = product.product(soft_TV.to(h_TD.dtype), part.weight_VD).to(z_TV.dtype)
    return replace(scored, soft_TD=soft_TD, pull_TD=_pull(scored, part))


def _pull(scored: Scored, part: Part) -> Tensor:
    """The gradient of h, less what is times a token's factor; up to each token's weight."""
    head, slope_TV, dtype = part.head, scored.slope_TV, scored.exp_TV.dtype
    smooth = head.options.label_smoothing
    here_T = scored.here_T * (-head.factor * (1 - smooth))
    if isinstance(slope_TV, Tensor):
        here_T = here_T * slope_TV.gather(1, scored.index_T1).squeeze(1)
    else:
        here_T = here_T * slope_TV
    pull_TD = part.weight_VD[scored.index_T1.squeeze(1)].to(dtype) * here_T.unsqueeze(1)
    if smooth:
        if isinstance(slope_TV, Tensor):
            even_TD = product.product(slope_TV.to(part.weight_VD.dtype), part.weight_VD).to(dtype)
        else:
            even_TD = part.weight_VD.to(dtype).sum(0) * slope_TV
        pull_TD -= (head.factor * smooth / part.vocabulary.size) * even_TD
    return pull_TD


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
    head, z_TV = part.head, scored.exp_TV
    smooth = head.options.label_smoothing
    z_TV.mul_(agreed.factor_T.unsqueeze(1))
    pull_T1 = (scored.here_T * agreed.weight_T * (-head.factor * (1 - smooth))).unsqueeze(1)
    z_TV.scatter_add_(1, scored.index_T1, pull_T1)
    if smooth:
        share = head.factor * smooth / part.vocabulary.size
        z_TV.sub_((agreed.weight_T * share).unsqueeze(1))
    z_TV.mul_(scored.slope_TV)
    g_TV = z_TV.to(scored.h_TD.dtype)
    head.accumulate(part.weight_VD, part.bias_V, g_TV, scored.h_TD)
    return product.product(g_TV, part.weight_VD) if scored.soft_TD is None else None
