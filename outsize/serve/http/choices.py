"""One choice of an answer: tokens from the engine, made into text as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outsize.data.tokenizer import Tokenizer
from outsize.decode.samplers import Sampler
from outsize.decode.text import StopStrings
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, End, Token
from outsize.serve.calls import Call, CallForm
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
    """Text that has become certain, the tokens that it begins, why the choice is over, if it is
    (stop, length or tool_calls), and the tools that it calls. unseen: tokens that were drawn and
    are of a stop string alone, or the end; begins: of each token the characters of the choice
    before it."""

    text: str
    tokens: tuple[Token, ...]
    reason: str | None = None
    calls: tuple[Call, ...] = ()
    unseen: int = 0
    begins: tuple[int, ...] = ()


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


class _Shown:
    """Text of tokens up to a stop string, and which of them are behind what is shown."""

    def __init__(self, text: Tokenizer, stops: Collection[str]) -> None:
        self._stream, self._held = text.stream(), StopStrings(stops)
        self._waiting = deque[tuple[int, Token]]()  # with where their text begins
        self._came = self._shown = 0  # characters
        self.ended = 0  # by a token that says nothing

    def push(self, token: Token) -> str:
        self._waiting.append((self._came, token))
        return self._through(self._stream.push(token.id))

    def finish(self) -> str:
        return self._through(self._stream.finish()) + self._held.finish()

    def _through(self, text: str) -> str:
        self._came += len(text)
        shown = self._held.push(text)
        self._shown += len(shown)
        return shown

    @property
    def stopped(self) -> bool:
        return self._held.stopped

    def piece(self, text: str, reason: str | None = None) -> Piece:
        """Of what is shown, with the tokens that begin in it, once; of a choice that is over for
        another reason than a stop string with all that are left."""
        some = list[tuple[int, Token]]()
        every = reason is not None and not self.stopped
        while self._waiting and (every or self._waiting[0][0] < self._shown):
            some.append(self._waiting.popleft())
        begins, tokens = tuple(at for at, _ in some), tuple(token for _, token in some)
        reason = "stop" if self.stopped else reason
        unseen = 0 if reason is None else len(self._waiting) + self.ended
        return Piece(text, tokens, reason, unseen=unseen, begins=begins)


async def pieces(
    engine: Engine, text: Tokenizer, ask: Ask, stops: Collection[str]
) -> AsyncGenerator[Piece, None]:
    """A choice as it comes. OutsizeError where the engine ends it."""
    found = _Shown(text, stops)
    async with contextlib.aclosing(drawn(engine, ask)) as events:
        async for event in events:
            if isinstance(event, Token):
                if event.id in ask.stop:
                    found.ended = 1
                    continue
                shown = found.push(event)
                if shown or found.stopped:
                    yield found.piece(shown)
                if found.stopped:
                    return
                continue
            if event.reason in ("error", "cancelled"):
                raise OutsizeError(event.error or "the server is closing")
            yield found.piece(found.finish(), event.reason)
            return


async def calling(
    found: AsyncGenerator[Piece, None], text: Tokenizer, form: CallForm
) -> AsyncGenerator[Piece, None]:
    """A choice that may call tools: what is said before, and at the end what is called."""
    content = _Content(text, form)
    async with contextlib.aclosing(found) as every:
        async for one in every:
            shown = content.push(one)
            if one.reason is None:
                if shown:
                    yield Piece(shown, content.taken())
                continue
            calls = tuple(form.calls(text.written(content.ids)))
            reason = "tool_calls" if calls and one.reason == "stop" else one.reason
            yield Piece(shown + content.finish(), content.taken(), reason, calls, one.unseen)


class _Content:
    """What of an answer is said before it calls a tool."""

    def __init__(self, text: Tokenizer, form: CallForm) -> None:
        self._text, self._head = text, "" if form.begin else form.head
        special = [one for one in text.special if form.begin.startswith(one)]
        self._token = text.encode(max(special, key=len))[0] if special else None
        self._held = StopStrings([form.begin] if form.begin and not special else ())
        self.ids, self._tokens = list[int](), list[Token]()
        self._shown, self._waiting, self._over = 0, "", False

    def push(self, piece: Piece) -> str:
        self._tokens += piece.tokens
        before, self.ids = len(self.ids), [*self.ids, *(one.id for one in piece.tokens)]
        if self._over:
            return ""
        if self._token is not None and self._token in self.ids[before:]:
            self._over, at = True, self.ids.index(self._token, before)
            return self._text.decode(self.ids[:at])[self._shown :]
        shown = self._held.push(piece.text if not self._head else self._behind_head(piece.text))
        self._over |= self._held.stopped
        self._shown += len(shown)
        return shown

    def _behind_head(self, text: str) -> str:
        """Where calls begin with nothing of their own, the first characters tell them."""
        self._waiting += text
        if self._waiting.startswith(self._head):
            self._over = True
        if self._over or self._head.startswith(self._waiting):
            return ""
        self._head = ""
        return self._waiting

    def finish(self) -> str:
        """What waited, where nothing is called."""
        return "" if self._over else (self._waiting if self._head else self._held.finish())

    def taken(self) -> tuple[Token, ...]:
        """Those that have come since."""
        taken, self._tokens = tuple(self._tokens), []
        return taken
