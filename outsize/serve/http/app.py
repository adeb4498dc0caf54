"""The API: OpenAI's requests and answers over an engine.

What the API has and this does not is answered with 400 or 404 and the field's name. Errors are
OpenAI's in form: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from outsize.data.tokenizer import Tokenizer
from outsize.decode.text import check_prompt, many_ids
from outsize.errors import OutsizeError, TooLong, counted
from outsize.serve.asks import Full
from outsize.serve.calls import CallForm
from outsize.serve.engine import Engine
from outsize.serve.http import told
from outsize.serve.http.answers import ChatAnswer, CompletionAnswer, unless_left
from outsize.serve.http.asked import (
    Completion,
    Conversation,
    Embedding,
    JsonObject,
    JsonSchema,
    Text,
    Tokens,
)
from outsize.serve.http.bodies import Route
from outsize.serve.http.guard import fault, later
from outsize.serve.http.keys import allowance
from outsize.serve.http.metrics import metrics_of
from outsize.serve.http.shapes import Shapes
from outsize.serve.http.told import answers
from outsize.serve.model import ends_of
from outsize.serve.pooling import PLAIN, Pooling
from outsize.serve.talk import Talk

_BODY = (400, 404, 408, 413, 503)  # what may come where a body is read
_ASKED = (*_BODY, 500)
_FIELDS = frozenset((*Completion.model_fields, *Conversation.model_fields, "dimensions", "tokens"))
STUCK = 120.0  # seconds without a step while somebody waits


@dataclass(frozen=True)
class Serving:
    """What the API speaks for. name: of the model; talk: how its chats are written, None: it has no
    template; plan: lines about what it holds; keyed: whether a key is asked for; pooling: of
    embeddings."""

    engine: Engine
    text: Tokenizer
    name: str
    talk: Talk | None
    plan: Sequence[str] = ()
    keyed: bool = False
    pooling: Pooling = PLAIN

    def ends(self, talking: bool) -> frozenset[int]:
        """The ids that end a text, or an answer."""
        return self.talk.ends if talking and self.talk is not None else self._ends

    @cached_property
    def _ends(self) -> frozenset[int]:
        return ends_of(self.engine.model, self.text)

    @cached_property
    def shapes(self) -> Shapes:
        return Shapes(self.text, self.engine.model.config.vocab, self.ends(True))


class Missing(OutsizeError):
    """There is no such model."""


def app_of(serving: Serving) -> FastAPI:
    """The application; its engine starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with serving.engine:
            yield

    app = FastAPI(title="Outsize", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = Route
    _errors(app, serving)
    _models(app, serving)
    _generation(app, serving)
    _embeddings(app, serving)
    _tokens(app, serving)
    _state(app, serving)
    _page(app, serving)
    _document(app)
    return app


def _document(app: FastAPI) -> None:
    """What is wrong with a body is answered with 400, so no 422 is in the document. It is written
    when it is first asked for."""
    written = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = written()
            for path in found["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                found["components"]["schemas"].pop(unused, None)
        return written()

    app.openapi = document  # type: ignore[method-assign]


def _errors(app: FastAPI, serving: Serving) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return said(400, *_wrong(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        return said(error.status_code, detail, _field(detail), headers=error.headers)

    @app.exception_handler(OutsizeError)
    async def ours(_: Request, error: OutsizeError) -> Response:
        if isinstance(error, Full):
            return said(429, str(error), headers=later(error))
        if serving.engine.fault is not None:
            return said(500, str(error))  # whatever was asked
        if isinstance(error, Missing):
            return said(404, str(error), "model")
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return said(400, str(error), _field(str(error)), code=code)


def _field(message: str) -> str | None:
    """That a message begins with, if it does."""
    field = message.partition(": ")[0]
    return field if field in _FIELDS else None


def _wrong(every: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """What is wrong with a body, and with which field."""
    first = every[0]
    if first["type"] == "json_invalid":
        return f"the body: not JSON behind {counted(first['loc'][-1], 'character')}", None
    if first["type"] == "value_error":  # of fields that do not go together
        message = str(first["ctx"]["error"])
        return message, _field(message)
    own = [one for one in every if one["loc"][:2] == first["loc"][:2]]
    # Of several forms that it might have the one that it fits furthest.
    first = max(own, key=_fits)
    where = _where(first)
    return f"{'.'.join(where) or 'the body'}: {first['msg']}", ".".join(where[:1]) or None


def _fits(error: Mapping[str, Any]) -> tuple[bool, int, int]:
    where = _where(error)
    place = int(where[-1]) if where and where[-1].isdecimal() else -1
    return not error["type"].endswith("_type"), len(where), place


def _where(error: Mapping[str, Any]) -> list[str]:
    """The path of what is wrong in a body, without the forms that were tried."""
    path = [str(one) for one in error["loc"] if one not in ("body", "str")]
    return [one for one in path if "[" not in one or one == "[key]"]


def said(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    code: str | None = None,
) -> Response:
    return JSONResponse(fault(status, message, param, code), status, headers)


def _models(app: FastAPI, serving: Serving) -> None:
    made = {"id": serving.name, "object": "model", "created": int(time.time()),
            "owned_by": "outsize"}  # fmt: skip

    @app.get("/v1/models", **answers(told.Models))
    async def models() -> Any:
        return {"object": "list", "data": [made]}

    @app.get("/v1/models/{name:path}", **answers(told.Model, 404))
    async def model(name: str) -> Any:
        _check_model(serving, name)
        return made


def _check_model(serving: Serving, name: str | None) -> None:
    if name is not None and name != serving.name:
        raise Missing(f"model {name!r} is not here; this server has {serving.name!r}")


def _generation(app: FastAPI, serving: Serving) -> None:
    numbers = itertools.count()

    def ident(kind: str) -> str:
        return f"{kind}-{secrets.token_hex(8)}{next(numbers):x}"

    @app.post("/v1/completions", **answers(told.Completion, *_ASKED, streamed=True))
    async def completions(asked: Completion, request: Request) -> Any:
        _check_model(serving, asked.model)
        prompts = await _all_ids(serving, _listed(asked.prompt))
        return await CompletionAnswer(serving, asked, prompts, ident("cmpl")).respond(request)

    @app.post("/v1/chat/completions", **answers(told.ChatCompletion, *_ASKED, streamed=True))
    async def chat(asked: Conversation, request: Request) -> Any:
        _check_model(serving, asked.model)
        if serving.talk is None:
            raise OutsizeError(
                "messages: this model has no chat template; serve it with --template, or ask"
                " /v1/completions"
            )
        form = serving.talk.calls if asked.offered else None  # before the tools are written out
        offered = [one.model_dump(exclude_none=True) for one in asked.tools or ()]
        messages = [one.plain() for one in asked.messages]
        ids = await asyncio.to_thread(
            serving.talk.prompt, messages, offered if asked.offered else None
        )
        shape = await asyncio.to_thread(_shape, serving, asked, form)
        answer = ChatAnswer(serving, asked, [ids], ident("chatcmpl"), shape, form)
        return await answer.respond(request)


def _shape(serving: Serving, asked: Conversation, form: CallForm | None) -> Any:
    """What an answer is to be, None: any text. OutsizeError for what cannot be compiled."""
    if form is not None:
        tools = {one.function.name: one.function.parameters for one in asked.offered}
        return serving.shapes.calling(form, tools, asked.must_call, asked.parallel_tool_calls)
    wanted = asked.response_format
    if isinstance(wanted, JsonObject):
        return serving.shapes.of({"type": "object"})
    return serving.shapes.of(wanted.json_schema.shape) if isinstance(wanted, JsonSchema) else None


def _listed(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    several = [one for one in prompt if not isinstance(one, int)]
    return several or [[one for one in prompt if isinstance(one, int)]]


async def _all_ids(serving: Serving, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Of all texts, or of all ids. Steps and others' answers go on meanwhile."""
    texts = [one for one in prompts if isinstance(one, str)]
    if texts:
        return await asyncio.to_thread(many_ids, serving.text, texts)
    return [one for one in prompts if not isinstance(one, str)]


def _embeddings(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/embeddings", **answers(told.Vectors, *_ASKED))
    async def embeddings(asked: Embedding, request: Request) -> Any:
        _check_model(serving, asked.model)
        config = serving.engine.model.config
        size = config.embed_size or config.hidden
        if asked.dimensions is not None and asked.dimensions > size:
            raise OutsizeError(f"dimensions: {asked.dimensions}; this model has {size}")
        texts = await asyncio.to_thread(_framed, serving, _listed(asked.input))
        for ids in texts:
            serving.engine.check(ids, 1)
        allowance(request.scope).begin(sum(map(len, texts)))
        return await unless_left(request, _vectors(serving, asked, texts))


async def _vectors(
    serving: Serving, asked: Embedding, texts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    found, vector = list[dict[str, Any]](), serving.pooling.vector
    for index, ids in enumerate(texts):
        each_E = await asyncio.to_thread(vector, serving.engine, ids, asked.dimensions)
        said: Any = each_E.tolist()
        if asked.encoding_format == "base64":
            said = base64.b64encode(each_E.numpy().astype("<f4").tobytes()).decode()
        found.append({"object": "embedding", "index": index, "embedding": said})
    count = sum(map(len, texts))
    return {
        "object": "list", "data": found, "model": serving.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }  # fmt: skip


def _framed(serving: Serving, texts: Sequence[str | list[int]]) -> list[list[int]]:
    found = list[list[int]]()
    for text in texts:
        if isinstance(text, str):
            check_prompt(text)
        found.append(serving.text.framed(text) if isinstance(text, str) else text)
    return found


def _tokens(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", **answers(told.Ids, *_BODY))
    async def tokenize(asked: Text) -> Any:
        _check_model(serving, asked.model)
        (ids,) = await _all_ids(serving, [asked.prompt])
        if not asked.add_special_tokens and isinstance(asked.prompt, str):
            ids = await asyncio.to_thread(serving.text.encode, asked.prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": serving.engine.limit}

    @app.post("/detokenize", **answers(told.Words, *_BODY))
    async def detokenize(asked: Tokens) -> Any:
        _check_model(serving, asked.model)
        wrong = [one for one in asked.tokens if one >= serving.text.vocab_size]
        if wrong:
            raise OutsizeError(
                f"tokens: {wrong[0]}; expected 0 to {serving.text.vocab_size - 1}, the"
                " tokenizer's vocabulary"
            )
        return {"prompt": await asyncio.to_thread(serving.text.decode, asked.tokens)}


def _page(app: FastAPI, serving: Serving) -> None:
    facts = {
        "name": serving.name, "plan": list(serving.plan), "keyed": serving.keyed,
        "chats": serving.talk is not None,
    }  # fmt: skip
    raw = files("outsize.serve.http").joinpath("page.html").read_text(encoding="utf-8")
    said = json.dumps(facts).replace("<", "\\u003c")  # a name ends no script
    page = raw.replace("/*FACTS*/null", said)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    headers = {"Content-Security-Policy": f"{policy} connect-src 'self'"}

    @app.get("/", include_in_schema=False)
    async def chat() -> Response:
        return HTMLResponse(page, headers=headers)


def _state(app: FastAPI, serving: Serving) -> None:
    metrics = metrics_of(serving.engine)

    @app.get("/health", **answers(told.Health, 503))
    async def health() -> Response:
        if serving.engine.stuck(STUCK):
            return said(503, "requests wait, and no step is made")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")
