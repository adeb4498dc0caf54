"""What is asked of the engine, and what it tells: data alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.decode.samplers import Sampler
from outsize.errors import OutsizeError
from outsize.kernels.entropy import logprobs
from outsize.kernels.pages import AS_STORED
from outsize.serve.price import FREE, Price
from outsize.serve.slo import NONE, Slo


@dataclass(frozen=True)
class Ask:
    """A prompt and how it is gone on with. stop: tokens that end it, told as its last; tops: of how
    many of the likeliest tokens log-probabilities are told, None: of none, not of the drawn one
    either; owner: who asks, for policies that are fair; came: seconds of the clock at which he did,
    None: now."""

    ids: tuple[int, ...]
    max_new_tokens: int
    sampler: Sampler
    stop: frozenset[int] = frozenset()
    tops: int | None = None
    owner: str = ""
    came: float | None = None


@dataclass(frozen=True)
class Token:
    """A token was drawn. logprob: the log of the probability that the model gave it, NaN where
    nobody asked; tops: of the likeliest ones."""

    id: int
    logprob: float = math.nan
    tops: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class End:
    """A request is over. reason: stop, length, cancelled, or error with its words."""

    reason: str
    error: str = ""


Deliver = Callable[[Token | End], None]  # on the engine's thread


@dataclass(frozen=True)
class Room:
    """pages: of `page` tokens each; slots: requests that go at once; budget: tokens of a step;
    queue: tokens of requests that may wait; context: of a request with what is drawn, at most;
    price: of steps; slo: what is promised; cache: the form of what pages hold
    (outsize/kernels/pages.py); below: pages that may lie below; lies: how the cache does, where it
    is not in pages that lie anywhere (outsize/decode/caches.py)."""

    pages: int
    page: int
    slots: int
    budget: int
    queue: int
    context: int
    price: Price = FREE
    slo: Slo = NONE
    cache: str = AS_STORED
    below: int = 0
    lies: str = ""


class Full(OutsizeError):
    """Too many wait. wait: seconds until there may be room, foretold."""

    def __init__(self, message: str, wait: float) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass
class Counts:
    """Since the start. kept: tokens of prompts that were in pages already; drafted, accepted:
    tokens of drafts, and those that came true; evicted, fetched: pages that went below, and that
    came back; lost: that did not; busy, foretold: seconds in steps."""

    steps: int = 0
    prompt: int = 0
    kept: int = 0
    drawn: int = 0
    interrupted: int = 0
    drafted: int = 0
    accepted: int = 0
    refused: int = 0
    evicted: int = 0
    fetched: int = 0
    lost: int = 0
    busy: float = 0.0
    foretold: float = 0.0


def told(logits_V: Tensor, token: int, tops: int | None) -> Token:
    """A token with the log-probabilities that are asked for, of the raw logits; of those that are
    as likely the lowest ids."""
    if tops is None:
        return Token(token)
    logs_V = logprobs(logits_V)
    values, ids = logs_V.topk(min(tops, len(logs_V)))
    least = values[-1] if tops else 0.0
    lowest = (logs_V == least).nonzero()[: int((values == least).sum()), 0]
    ids = torch.cat([ids[values > least], lowest])
    found = sorted(zip((-logs_V[ids]).tolist(), ids.tolist(), strict=True))
    return Token(token, float(logs_V[token]), tuple((one, -value) for value, one in found))
