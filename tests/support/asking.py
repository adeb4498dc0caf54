"""Requests for engines: what is asked, and what they are told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outsize.decode.samplers import Sampling
from outsize.serve.asks import Ask, End, Room, Token
from outsize.serve.engine import Engine
from outsize.serve.model import Model
from outsize.serve.price import Curve, Price

PRICE = Price(Curve(((1, 0.01), (64, 0.1))), Curve(((1, 0.001), (8, 0.003))), 1e-5)
ROOM = Room(pages=32, page=4, slots=8, budget=64, queue=1000, context=64, price=PRICE)
# Room that is narrow: in slices and slots, or in pages, so that requests are interrupted.
ROOMS = {"slices": replace(ROOM, budget=5, slots=3), "pages": replace(ROOM, pages=14)}
VOCAB = 61


def asks() -> list[Ask]:
    """Prompts of many lengths, some of which begin alike, greedy ones and others."""
    seeded = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (40,), generator=seeded).tolist()
    found = []
    for number, (length, new) in enumerate(((1, 9), (23, 5), (9, 12), (30, 1), (24, 6))):
        own = torch.randint(VOCAB, (length,), generator=seeded).tolist()
        ids = text[:length] if number % 2 else own
        sampling = Sampling(0.0 if number % 3 == 0 else 1.0, seed=number)
        found.append(Ask(tuple(ids), new, sampling, frozenset(), 2))
    return found


class Told:
    """What a request is told."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.end: End | None = None
        self.over = threading.Event()

    def __call__(self, one: Token | End) -> None:
        if isinstance(one, Token):
            self.tokens.append(one)
        else:
            self.end = one
            self.over.set()

    def wait(self) -> list[Token]:
        assert self.over.wait(120), "the engine stands still"
        return self.tokens


def answered(engine: Engine, some: Sequence[Ask]) -> list[list[Token]]:
    """What all are told that ask an engine together, before its first step."""
    each = [Told() for _ in some]
    for ask, one in zip(some, each, strict=True):
        engine.submit(ask, one)
    engine.start()
    found = [one.wait() for one in each]
    assert engine.line.pages.left == engine.room.pages and engine.fault is None
    return found


@torch.no_grad()
def plainly(model: Model, ask: Ask, found: Sequence[Token], limit: float) -> Tensor:
    """logs_TV of one full pass over a request and what it was told, whose log-probabilities are no
    farther from it than so."""
    logs_TV = model(torch.tensor([*ask.ids, *(one.id for one in found)])).log_softmax(-1)
    for place, one in enumerate(found, len(ask.ids) - 1):
        assert abs(one.logprob - float(logs_TV[place, one.id])) < limit
    return logs_TV


class Unkept(list[float]):
    """Seconds of steps of which there are many."""

    def append(self, seconds: float) -> None:
        pass
