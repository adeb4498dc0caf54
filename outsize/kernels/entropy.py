"""Cross-entropy and its gradient from a chunk of logits, of which workers may have a part each.

Label smoothing (Szegedy et al., "Rethinking the Inception architecture", 2015) as PyTorch's
cross_entropy has it: the target has 1 - s of the probability and every token of the vocabulary
s / V. z-loss (Chowdhery et al., "PaLM", 2022): z times the square of the log of the softmax's sum.

Where the vocabulary is cut, every number that is of the whole of it (largest logit, sum, mean, the
target's logit) is made of all workers' numbers: four a token, in one exchange a chunk.

C tokens of a chunk, V vocabulary (here), R workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import native, rows
from outsize.torch_private import FakeTensor

IGNORE = -100  # target of a token that has none
DRAWN = "drawn"  # the column of targets that are drawn (outsize/kernels/drawing.py)
Span = tuple[int, int]


@dataclass(frozen=True)
class LossOptions:
    """What is added to the plain cross-entropy in training. label_smoothing: share of the
    probability that is spread evenly, [0, 1). z_loss: weight of the squared log-sum-exp."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise OutsizeError(
                f"loss: label_smoothing is {self.label_smoothing}; expected 0 or more, below 1"
            )
        if not 0.0 <= self.z_loss < float("inf"):
            raise OutsizeError(f"loss: z_loss is {self.z_loss}; expected 0 or more, as 1e-4")


PLAIN = LossOptions()


@runtime_checkable
class Loss(Protocol):
    """What is trained on, made of each target's cross-entropy: the negative log of the probability
    that the model gives it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of each target beside that, from a batch's columns: coefficients, the
        log-probabilities of other models."""

    def of(self, entropy_C: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each target's loss, and its derivative by the cross-entropy. Their weights and the one
        division come afterwards; what it gives for a token without a target is not used."""


@dataclass(frozen=True)
class Targets:
    """What the tokens of a microbatch should say next. ids: int64, IGNORE where there is nothing to
    be said. weights: float32, what each one's loss is times; None for 1. columns: what else a loss
    reads of each."""

    ids_T: Tensor
    weights_T: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def at(self, here: slice) -> Targets:
        """Some of them."""
        weights_T = None if self.weights_T is None else self.weights_T[here]
        return Targets(
            self.ids_T[here], weights_T, {name: x_T[here] for name, x_T in self.columns.items()}
        )


class Gather(Protocol):
    """What the loss asks of other workers; outsize.collectives.Collective has it."""

    @property
    def rank(self) -> int: ...

    def all_gather(self, mine: Tensor, spans: Sequence[Span], out: Tensor) -> None:
        """out[spans[r]] = worker r's `mine`, for every r."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the vocabulary whose logits are here. spans: by worker, [first, last)."""

    spans: tuple[Span, ...]
    others: Gather

    @property
    def span(self) -> Span:
        """Of this worker."""
        return self.spans[self.others.rank]

    @property
    def size(self) -> int:
        """Of the whole vocabulary."""
        return self.spans[-1][1]


@dataclass(frozen=True)
class Seen:
    """Of the logits z of a token, over the whole vocabulary: top, the largest; total, the sum of
    exp(z - top); picked, the target's z - top; mean, of z - top (where it is asked for); grown: the
    exp(z - own top) that are here times this are exp(z - top)."""

    top_C: Tensor
    total_C: Tensor
    picked_C: Tensor
    mean_C: Tensor | None = None
    grown_C: Tensor | None = None


def greatest(x_V: Tensor) -> int:
    """The place of the largest of some numbers, the first of several that are equal; what is no
    number counts as larger than any."""
    if len(x_V) and native.fits(x_V):
        found: int = native.loaded().outsize_greatest(
            native.CODES[x_V.dtype], x_V.data_ptr(), len(x_V)
        )
        return found
    return int(x_V.argmax())


def logprobs(logits: Tensor) -> Tensor:
    """Logs of the probabilities that logits (..., V) stand for, float64: each row's its own."""
    return logits.detach().double().log_softmax(-1)


def check(targets_T: Tensor, size: int) -> None:
    """OutsizeError for a target that is no token of a vocabulary of `size`."""
    if isinstance(targets_T, FakeTensor) or targets_T.is_meta:
        return
    wrong_T = (targets_T != IGNORE) & ((targets_T < 0) | (targets_T >= size))
    if wrong_T.any():
        raise OutsizeError(
            f"target {int(targets_T[wrong_T][0])} is no token of a vocabulary of {size};"
            f" expected 0 to {size - 1}, or {IGNORE} where there is none"
        )


def plain(
    logits_CV: Tensor,
    targets: Targets,
    factor: float,
    gradient: bool,
    options: LossOptions = PLAIN,
    vocabulary: Vocabulary | None = None,
    loss: Loss | None = None,
) -> Tensor:
    """Sum of the losses of a chunk times factor; with `gradient`, logits become their gradient.

    The twin of outsize_cross_entropy, which has neither options, tokens elsewhere nor another loss;
    logits are at least float32 here. The sum is the same on all workers, the gradient of each
    worker's logits.
    """
    targets_C = targets.ids_T
    valid_C = targets_C != IGNORE
    here_C, index_C = valid_C, targets_C
    if vocabulary is not None:
        first, last = vocabulary.span
        here_C = valid_C & (targets_C >= first) & (targets_C < last)
        index_C = targets_C - first
    index_C1 = index_C.masked_fill(~here_C, 0).unsqueeze(1)
    smooth = options.label_smoothing
    told_C = None
    if loss is not None and rows.here():
        told_C = logprobs(logits_CV).gather(1, index_C1).squeeze(1)
    seen = _look(logits_CV, index_C1, here_C, smooth > 0.0, vocabulary)
    losses_C, slope_C = losses(seen, options)
    if told_C is not None:  # what serving says of the same tokens
        losses_C = losses_C.copy_(-told_C)
    losses_C, counted_C = weighed(losses_C, targets, loss)
    if gradient:
        logits_CV.mul_((slope_C * counted_C * factor).unsqueeze(1))
        pull_C = here_C * (counted_C * -(factor * (1 - smooth)))
        logits_CV.scatter_add_(1, index_C1, pull_C.unsqueeze(1))
        if smooth:
            size = logits_CV.shape[1] if vocabulary is None else vocabulary.size
            logits_CV.sub_((counted_C * (factor * smooth / size)).unsqueeze(1))
    return losses_C.sum() * factor


def by_token(logits_CV: Tensor, targets_C: Tensor, options: LossOptions = PLAIN) -> Tensor:
    """Each token's loss, 0 where there is no target. Logits, at least float32, are written over."""
    here_C = targets_C != IGNORE
    index_C1 = targets_C.masked_fill(~here_C, 0).unsqueeze(1)
    seen = _look(logits_CV, index_C1, here_C, options.label_smoothing > 0.0, None)
    return losses(seen, options)[0].masked_fill(~here_C, 0.0)


def weighed(losses_C: Tensor, targets: Targets, loss: Loss | None) -> tuple[Tensor, Tensor]:
    """Losses as they are summed, and what each token's gradient of the cross-entropy is times."""
    counted_C = (targets.ids_T != IGNORE).to(losses_C.dtype)  # not bool: bool * float: fp32
    if targets.weights_T is not None:
        counted_C = counted_C * targets.weights_T
    if loss is None:
        return losses_C * counted_C, counted_C
    made_C, slope_C = loss.of(losses_C, targets.columns)
    without_C = counted_C == 0  # whatever the columns have there, be it no number
    made_C, slope_C = (x_C.masked_fill(without_C, 0.0) for x_C in (made_C, slope_C))
    return made_C * counted_C, slope_C * counted_C


def losses(seen: Seen, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Each token's loss, and what exp(z - own top) is times to be the gradient of its first term
    (log of the sum, and its square) by z."""
    smooth, log_C = options.label_smoothing, seen.total_C.log()
    losses_C = log_C - (1 - smooth) * seen.picked_C if smooth else log_C - seen.picked_C
    slope_C = 1 / seen.total_C
    if seen.mean_C is not None:
        losses_C = losses_C - smooth * seen.mean_C
    if options.z_loss:
        lse_C = seen.top_C + log_C
        losses_C = losses_C + options.z_loss * lse_C.square()
        slope_C = slope_C * (1 + 2 * options.z_loss * lse_C)
    return losses_C, slope_C if seen.grown_C is None else slope_C * seen.grown_C


def _look(
    logits_CV: Tensor,
    index_C1: Tensor,
    here_C: Tensor,
    want_mean: bool,
    vocabulary: Vocabulary | None,
) -> Seen:
    """What there is to see of the logits, which become exp(z - own top)."""
    if vocabulary is not None:
        return together(vocabulary, numbers(logits_CV, index_C1, here_C, want_mean))
    top_C, total_C, picked_C, *more = _own(logits_CV, index_C1, want_mean)
    return Seen(top_C, total_C, picked_C, *(sum_C / logits_CV.shape[1] for sum_C in more))


def _own(logits_CV: Tensor, index_C1: Tensor, want_mean: bool) -> list[Tensor]:
    """Largest logit, sum of exp(z - top), the target's z - top, and perhaps the sum of z - top, of
    the logits that are here. They become exp(z - top)."""
    top_C1 = logits_CV.amax(1, keepdim=True)
    logits_CV.sub_(top_C1)
    picked_C = logits_CV.gather(1, index_C1).squeeze(1)
    sums = [logits_CV.sum(1)] if want_mean else []
    logits_CV.exp_()
    return [top_C1.squeeze(1), logits_CV.sum(1), picked_C, *sums]


def numbers(logits_CV: Tensor, index_C1: Tensor, here_C: Tensor, want_mean: bool) -> Tensor:
    """What others must know of a worker's logits, a row each: own top, sum of exponentials, the
    target's logit or 0, and where the mean of all is wanted the sum of z - own top. Logits become
    exp(z - own top)."""
    top_C, total_C, picked_C, *more = _own(logits_CV, index_C1, want_mean)
    picked_C = (picked_C + top_C) * here_C  # one of the workers has the target's logit
    return torch.stack((top_C, total_C, picked_C, *more))


def together(vocabulary: Vocabulary, mine_XC: Tensor) -> Seen:
    """What all workers see together. mine: the numbers of this one."""
    workers, count = len(vocabulary.spans), mine_XC.numel()
    all_RXC = mine_XC.new_empty((workers, *mine_XC.shape))
    spans = tuple((r * count, (r + 1) * count) for r in range(workers))
    vocabulary.others.all_gather(mine_XC.view(-1), spans, all_RXC.view(-1))
    tops_RC, totals_RC, picked_RC, *more = all_RXC.unbind(1)
    top_C = tops_RC.amax(0)
    shift_RC = tops_RC - top_C
    grown_RC = shift_RC.exp()
    mean_C = None
    for sums_RC in more:
        sizes_R1 = shift_RC.new_tensor([b - a for a, b in vocabulary.spans]).unsqueeze(1)
        mean_C = (sums_RC + sizes_R1 * shift_RC).sum(0) / vocabulary.size
    total_C = (totals_RC * grown_RC).sum(0)
    own = grown_RC[vocabulary.others.rank]
    return Seen(top_C, total_C, picked_RC.sum(0) - top_C, mean_C, own)
