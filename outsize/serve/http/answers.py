"""Answers to completions and chats, at once or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response

from outsize.decode.samplers import Sampler, Sampling
from outsize.errors import OutsizeError
from outsize.serve.asks import Ask, Token
from outsize.serve.calls import Call, CallForm
from outsize.serve.http.asked import Completion, Conversation
from outsize.serve.http.choices import Piece, Weighed, calling, pieces
from outsize.serve.http.guard import CAME, fault
from outsize.serve.http.keys import allowance
from outsize.serve.http.shapes import Shaped

if TYPE_CHECKING:
    from outsize.serve.http.app import Serving

Asked = TypeVar("Asked", Completion, Conversation)
DONE = "data: [DONE]\n\n"


@dataclass
class _Said:
    """A choice so far."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    reason: str | None = None
    calls: tuple[Call, ...] = ()

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.begins += piece.begins
        self.reason = piece.reason or self.reason
        self.calls += piece.calls


class Answer(ABC, Generic[Asked]):
    """prompts: token ids; each has `n` choices, and choice i of prompt p is number p n + i.
    shape: what an answer is to be, None: any text; form: how it calls tools, None: it may not."""

    kind = ""  # of object
    streamed = ""
    talking = False

    def __init__(
        self,
        serving: Serving,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        ident: str,
        shape: Any = None,
        form: CallForm | None = None,
    ) -> None:
        self.serving, self.prompts, self._shape, self._form = serving, prompts, shape, form
        self.asked: Asked = asked
        self.head = {"id": ident, "created": int(time.time()), "model": serving.name}
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        self.used, self._allowed = 0, allowance({})
        stop = asked.stop or ()
        self.stops = (stop,) if isinstance(stop, str) else tuple(stop)
        for ids in prompts:
            serving.engine.check(ids, self.most(ids))
        self._bias = self._biases()
        # With a seed each prompt of a list is told what it would be alone.
        apart = 0 if asked.seed is not None else asked.n
        self.asks = [
            self._ask(ids, seed + p * apart + i)
            for p, ids in enumerate(prompts)
            for i in range(asked.n)
        ]

    async def respond(self, request: Request) -> Response:
        """What goes back; nothing more is drawn for a client that has left."""
        self._allowed = allowance(request.scope)
        owner = self._allowed.key.secret or request.headers.get("authorization", "")
        came = request.scope.get(CAME)
        self.asks = [replace(ask, owner=owner, came=came) for ask in self.asks]
        if not self.asked.stream:
            return await unless_left(request, self.whole())
        # What is refused is refused with its status, before the first event is sent.
        events = self._events()
        first = await anext(events)

        async def every() -> AsyncGenerator[str, None]:
            async with contextlib.aclosing(events):
                yield first
                async for one in events:
                    yield one

        return StreamingResponse(every(), media_type="text/event-stream")

    async def whole(self) -> dict[str, Any]:
        said = [_Said() for _ in self.asks]
        async with contextlib.aclosing(self._pieces()) as found:
            async for number, piece in found:
                said[number].add(piece)
        choices = [await self.choice(number, one) for number, one in enumerate(said)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self._usage()}

    async def _events(self) -> AsyncGenerator[str, None]:
        wanted = self.asked.stream_options
        usage = wanted is not None and wanted.include_usage
        more = {"usage": None} if usage else {}
        head = {**self.head, "object": self.streamed}
        begun = set[int]()
        try:
            async with contextlib.aclosing(self._pieces()) as found:
                async for number, piece in found:
                    choice = await self.part(number, piece, number not in begun)
                    begun.add(number)
                    yield _event({**head, "choices": [choice], **more})
        except OutsizeError as error:
            if not begun:
                raise
            yield _event(fault(500, str(error)))
            return
        if usage:
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Of all choices, as they come; where one fails the others are cancelled."""
        self._allowed.begin(sum(map(len, self.prompts)))
        came = asyncio.Queue[tuple[int, Piece | BaseException]]()
        refused = False

        async def follow(number: int, ask: Ask) -> None:
            nonlocal refused
            if refused:  # with the one before it: nobody is asked how long this one would wait
                return
            try:
                made = pieces(self.serving.engine, self.serving.text, ask, self.stops)
                if self._form is not None:
                    made = calling(made, self.serving.text, self._form)
                async with contextlib.aclosing(made) as found:
                    async for piece in found:
                        came.put_nowait((number, piece))
            except Exception as error:
                refused = True
                came.put_nowait((number, error))

        tasks = [asyncio.create_task(follow(i, ask)) for i, ask in enumerate(self.asks)]
        try:
            left = len(tasks)
            while left:
                number, piece = await came.get()
                if isinstance(piece, BaseException):
                    raise piece
                drew = len(piece.tokens) + piece.unseen
                self._allowed.drew(drew)
                self.used += drew
                left -= piece.reason is not None
                yield number, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _biases(self) -> dict[int, float]:
        vocab, found = self.serving.engine.model.config.vocab, dict[int, float]()
        for name, more in (self.asked.logit_bias or {}).items():
            if not name.isdecimal() or int(name) >= vocab:
                raise OutsizeError(f"logit_bias: {name!r}; expected a token id, 0 to {vocab - 1}")
            found[int(name)] = more
        return found

    def _ask(self, ids: Sequence[int], seed: int) -> Ask:
        asked, bias = self.asked, self._bias
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, seed)
        weighed = Weighed(sampling, asked.presence_penalty, asked.frequency_penalty, bias)
        plain = not bias and not asked.presence_penalty and not asked.frequency_penalty
        sampler: Sampler = sampling if plain else weighed
        if self._shape is not None:
            sampler = Shaped(sampler, self._shape.deep_copy())
        return Ask(tuple(ids), self.most(ids), sampler, self.ends(), self.tops())

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt, "completion_tokens": self.used,
            "total_tokens": prompt + self.used,
        }  # fmt: skip

    def written(self, token: int) -> tuple[str, bytes]:
        """A token, and its bytes; one that is a part of a character by these, as OpenAI has it."""
        raw = self.serving.text.word(token)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{one:02x}" for one in raw), raw

    def ends(self) -> frozenset[int]:
        return self.serving.ends(self.talking)

    def room(self, ids: Sequence[int]) -> int:
        """Tokens that may be drawn behind these."""
        return max(1, self.serving.engine.limit - len(ids) + 1)

    @abstractmethod
    def most(self, ids: Sequence[int]) -> int:
        """Tokens that are drawn at most."""

    @abstractmethod
    def tops(self) -> int | None:
        """As in Ask."""

    @abstractmethod
    async def choice(self, number: int, said: _Said) -> dict[str, Any]:
        """A choice that is over."""

    @abstractmethod
    async def part(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        """What an event says of a choice."""


class CompletionAnswer(Answer[Completion]):
    kind = streamed = "text_completion"

    @cached_property
    def _before(self) -> list[str]:
        """What of each prompt stands before its choices."""
        return [self.serving.text.decode(x) if self.asked.echo else "" for x in self.prompts]

    @cached_property
    def _scored(self) -> dict[int, list[Token]]:
        """Of prompts whose own tokens are told."""
        return {}

    def most(self, ids: Sequence[int]) -> int:
        return self.room(ids) if self.asked.max_tokens is None else self.asked.max_tokens

    def tops(self) -> int | None:
        return self.asked.logprobs

    async def choice(self, number: int, said: _Said) -> dict[str, Any]:
        return await self.part(number, said, True)

    async def part(self, number: int, piece: Piece | _Said, first: bool) -> dict[str, Any]:
        prompt, logprobs = number // self.asked.n, None
        text = self._before[prompt] + piece.text if first else piece.text
        if self.asked.logprobs is not None:
            echoed = await self._echoed(prompt) if first and self.asked.echo else []
            offsets = self._begins([one.id for one in echoed])
            offsets += [len(self._before[prompt]) + at for at in piece.begins]
            logprobs = self._logprobs([*echoed, *piece.tokens], offsets, bool(echoed))
        return {
            "index": number, "text": text, "finish_reason": piece.reason, "logprobs": logprobs
        }  # fmt: skip

    async def _echoed(self, prompt: int) -> list[Token]:
        """The prompt's own tokens with their log-probabilities, the same for all its choices."""
        if prompt not in self._scored:
            ids, engine = self.prompts[prompt], self.serving.engine
            scored = await asyncio.to_thread(engine.logprobs, ids, self.asked.logprobs or 0)
            self._scored[prompt] = [Token(ids[0]), *scored]
        return self._scored[prompt]

    def _begins(self, ids: Sequence[int]) -> list[int]:
        """Of each token of a prompt the characters before it."""
        stream, found, at = self.serving.text.stream(), list[int](), 0
        for one in ids:
            found.append(at)
            at += len(stream.push(one))
        return found

    def _logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int], echoed: bool
    ) -> dict[str, Any]:
        """echoed: nothing is before the first token, which has none."""
        values = [one.logprob for one in tokens]
        tops = [_by_name((self.written(i)[0], x) for i, x in one.tops) for one in tokens]
        return {
            "tokens": [self.written(one.id)[0] for one in tokens],
            "token_logprobs": [None, *values[1:]] if echoed else values,
            "top_logprobs": [None, *tops[1:]] if echoed else tops,
            "text_offset": offsets,
        }


class ChatAnswer(Answer[Conversation]):
    kind, streamed, talking = "chat.completion", "chat.completion.chunk", True

    def most(self, ids: Sequence[int]) -> int:
        said = self.asked.max_completion_tokens or self.asked.max_tokens
        return said or self.room(ids)

    def tops(self) -> int | None:
        return (self.asked.top_logprobs or 0) if self.asked.logprobs else None

    async def choice(self, number: int, said: _Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.calls:
            message |= {"content": said.text or None, "tool_calls": _called(said.calls)}
        return {
            "index": number, "message": message, "finish_reason": said.reason,
            "logprobs": self._logprobs(said.tokens),
        }  # fmt: skip

    async def part(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if piece.text or not piece.calls:
            delta["content"] = piece.text
        if piece.calls:
            called = _called(piece.calls)
            delta["tool_calls"] = [{"index": i, **one} for i, one in enumerate(called)]
        return {
            "index": number, "delta": delta,
            "finish_reason": piece.reason, "logprobs": self._logprobs(piece.tokens),
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        return {"content": [self._entry(one) for one in tokens], "refusal": None}

    def _entry(self, token: Token) -> dict[str, Any]:
        tops = [self._word(i, value) for i, value in token.tops]
        return {**self._word(token.id, token.logprob), "top_logprobs": tops}

    def _word(self, token: int, logprob: float) -> dict[str, Any]:
        word, raw = self.written(token)
        return {"token": word, "logprob": logprob, "bytes": list(raw)}


def _called(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{secrets.token_hex(12)}", "type": "function",
         "function": {"name": one.name, "arguments": one.arguments}}
        for one in calls
    ]  # fmt: skip


def _by_name(tops: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The likeliest of those of one name."""
    found = dict[str, float]()
    for name, value in tops:
        found.setdefault(name, value)
    return found


async def unless_left(request: Request, found: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """What goes back; nothing more is done for a client that has left."""
    whole = asyncio.ensure_future(found)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(whole.result()) if whole.done() else Response(status_code=499)
    finally:
        for task in (whole, left):
            task.cancel()
        await asyncio.gather(whole, left, return_exceptions=True)


async def _left(request: Request) -> None:
    """Until the client has."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
