"""One choice of an answer: tokens from the engine, made into text as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outsize.data.tokenizer import Tokenizer
from outsize.decode.samplers import Sampler
from outsize.decode.text import StopStrings
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, End, Token
from outsize.serve.engine import Engine


@dataclass
class Weighed:
    """A sampler with OpenAI's penalties for tokens that were drawn before, and biases of logits."""

    inner: Sampler
    presence: float
    frequency: float
    bias: Mapping[int, float]
    drawn: Counter[int] = field(default_factory=Counter)

    def __call__(self, logits_V: Tensor, index: int) -> int:
        scores_V = logits_V.detach().float().clone()
        for token, more in self.bias.items():
            scores_V[token] += more
        if self.drawn and (self.presence or self.frequency):
            ids, counts = zip(*self.drawn.items(), strict=True)
            scores_V[list(ids)] -= self.presence + self.frequency * torch.tensor(counts)
        token = self.inner(scores_V, index)
        self.drawn[token] += 1
        return token


@dataclass(frozen=True)
class Piece:
    """Text that has become certain, the tokens that were drawn since the last piece, and why the
    choice is over, if it is: stop or length."""

    text: str
    tokens: tuple[Token, ...]
    reason: str | None = None


async def drawn(engine: Engine, ask: Ask) -> AsyncGenerator[Token | End, None]:
    """What the engine tells of a request; one that nobody reads on is cancelled."""
    loop, told = asyncio.get_running_loop(), asyncio.Queue[Token | End]()

    def deliver(event: Token | End) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(told.put_nowait, event)

    key = engine.submit(ask, deliver)
    try:
        while True:
            event = await told.get()
            yield event
            if isinstance(event, End):
                return
    finally:
        engine.cancel(key)


async def pieces(
    engine: Engine, text: Tokenizer, ask: Ask, stops: Collection[str]
) -> AsyncGenerator[Piece, None]:
    """A choice as it comes. OutsizeError where the engine ends it."""
    stream, held, waiting = text.stream(), StopStrings(stops), list[Token]()
    async with contextlib.aclosing(drawn(engine, ask)) as events:
        async for event in events:
            if isinstance(event, Token):
                if event.id in ask.stop:
                    continue
                waiting.append(event)
                shown = held.push(stream.push(event.id))
                if held.stopped:
                    yield Piece(shown, tuple(waiting), "stop")
                    return
                if shown:
                    yield Piece(shown, tuple(waiting))
                    waiting = []
                continue
            if event.reason in ("error", "cancelled"):
                raise OutsizeError(event.error or "the server is closing")
            rest = held.push(stream.finish()) + held.finish()
            yield Piece(rest, tuple(waiting), "stop" if held.stopped else event.reason)
            return
