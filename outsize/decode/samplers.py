"""Samplers: from the logits of the next token to its id.

Randomness is counter-based: the i-th token of a request depends on the logits and on (seed, i), so
neither the batch it runs in nor a resumed stream changes what is drawn. Top-k: Fan et al.,
"Hierarchical neural story generation", 2018; top-p: Holtzman et al., "The curious case of neural
text degeneration", 2020.

V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outsize.errors import OutsizeError
from outsize.kernels import native
from outsize.kernels.entropy import greatest, logprobs
from outsize.models.random import uniform

_ALIKE = 1e-9  # of a probability: what rounding may tell equal ones apart by
_STREAM = "sample"  # the name of the random stream that tokens are drawn with


class Sampler(Protocol):
    """Chooses the next token of one request."""

    def __call__(self, logits_V: Tensor, index: int) -> int:
        """The id of the request's new token number `index` (from 0). logits_V: in host memory,
        to which they come once for all requests of a step."""


class Drawn(NamedTuple):
    """A token, and the log of the probability that the model gave it, whatever the sampler made of
    that; NaN where nobody asked."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Sampling:
    """Draws from softmax(logits / temperature), cut to the `top_k` likeliest tokens and then to the
    fewest of the likeliest that have `top_p` of the rest; renormalised. Temperature 0 is greedy:
    of equal logits the lowest id's.

    OutsizeError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        given: Any = self  # by people, who have not read the types
        heat, k, p, seed = given.temperature, given.top_k, given.top_p, given.seed
        _expect(
            _is(heat, Real) and math.isfinite(heat) and heat >= 0,
            f"temperature is {heat!r}; expected a finite number, 0 (greedy) or more",
        )
        _expect(
            k is None or (_is(k, Integral) and k >= 1),
            f"top_k is {k!r}; expected at least 1, or none for all tokens",
        )
        _expect(
            _is(p, Real) and 0 < p <= 1,
            f"top_p is {p!r}; expected more than 0 and at most 1",
        )
        _expect(_is(seed, Integral), f"seed is {seed!r}; expected a whole number")

    def __call__(self, logits_V: Tensor, index: int) -> int:
        likeliest = greatest(logits_V)  # what is no number counts as the largest
        top = float(logits_V[likeliest])
        _expect(
            math.isfinite(top),
            f"the model gave logits for new token {index} that are not finite; expected numbers: "
            "check its weights, or use a wider dtype",
        )
        if self.temperature == 0:
            return likeliest
        part = float(uniform(self.seed, _STREAM, index, index + 1)[0])
        if native.fits(logits_V):
            return _drawn(logits_V, top, self, part)
        total_V = probabilities(logits_V, self).cumsum(0)
        drawn = part * float(total_V[-1])
        # the first token whose cumulated probability is above the drawn one: never one of zero. A
        # part of at most 1 - 2^-53 is below the whole however it is rounded
        return int(torch.searchsorted(total_V, drawn, right=True))


def _drawn(logits_V: Tensor, top: float, sampling: Sampling, part: float) -> int:
    """The same draw in one pass. top: the largest logit; part: of the whole."""
    room_V = torch.empty(len(logits_V), dtype=torch.float64)
    found: int = native.loaded().outsize_draw(
        native.CODES[logits_V.dtype],
        logits_V.data_ptr(),
        room_V.data_ptr(),
        len(logits_V),
        top,
        sampling.temperature,
        min(sampling.top_k or len(logits_V), len(logits_V)),
        1 - sampling.top_p,
        part,
    )
    return found


def _is(given: object, kind: type) -> bool:
    return isinstance(given, kind)


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """What `sampling` draws from, with a temperature above 0: (V,) float64 on the CPU.

    Tokens as likely as the k-th are kept with it. Of top_p's the likeliest always is, and of
    those that are as likely as its last one the lowest ids: what rounding tells apart is alike.
    """
    scores_V = logits_V.detach().to("cpu", torch.float64)
    scores_V = (scores_V - scores_V.max()) / sampling.temperature  # shifted: no overflow
    if sampling.top_k is not None and sampling.top_k < len(scores_V):
        least = scores_V.topk(sampling.top_k).values[-1] - _ALIKE
        scores_V = scores_V.masked_fill(scores_V < least, -math.inf)
    p_V = scores_V.softmax(0)
    if sampling.top_p < 1:
        ascending_V, order_V = p_V.sort()
        few = int((ascending_V.cumsum(0) <= 1 - sampling.top_p).sum())
        few = min(few, len(p_V) - 1)
        last = ascending_V[few]
        alike = slice(
            int(torch.searchsorted(ascending_V, last * (1 - _ALIKE))),
            int(torch.searchsorted(ascending_V, last * (1 + _ALIKE), right=True)),
        )
        order_V[alike] = order_V[alike].sort(descending=True).values
        p_V[order_V[:few]] = 0
    return p_V / p_V.sum()


def drawn(logits_V: Tensor, sampler: Sampler, index: int, scored: bool) -> Drawn:
    """What a sampler draws as token number `index`. scored: with its log-probability."""
    token = sampler(logits_V, index)
    if not scored:
        return Drawn(token, math.nan)
    return Drawn(token, float(logprobs(logits_V)[token]))


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise OutsizeError(message)
