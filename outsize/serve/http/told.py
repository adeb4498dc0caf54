"""What the API answers with, for its document: what is sent is made where it is known."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Reason = Literal["stop", "length", "tool_calls"]


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Fault(_Told):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Told):
    error: Fault


class Usage(_Told):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class CompletionLogprobs(_Told):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Told):
    index: int
    text: str
    finish_reason: Reason | None
    logprobs: CompletionLogprobs | None


class Completion(_Told):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Word(_Told):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Word] | None = None


class ChatLogprobs(_Told):
    content: list[Word]
    refusal: None


class CalledFunction(_Told):
    name: str
    arguments: str


class Call(_Told):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(_Told):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] | None = None


class ChatChoice(_Told):
    index: int
    message: Message
    finish_reason: Reason | None
    logprobs: ChatLogprobs | None


class ChatCompletion(_Told):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Vector(_Told):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, Field(description="base64 of little-endian float32")]


class Vectors(_Told):
    object: Literal["list"]
    model: str
    data: list[Vector]
    usage: Usage


class Model(_Told):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Told):
    object: Literal["list"]
    data: list[Model]


class Ids(_Told):
    tokens: list[int]
    count: int
    max_model_len: int


class Words(_Told):
    prompt: str


class Health(_Told):
    status: Literal["ok"]


_WHY = {
    400: "What was asked is not there, or cannot be.",
    401: "A key is missing, or is none of the server's.",
    404: "No such path or model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many wait, or the key has had its share; Retry-After says when to ask again.",
    500: "The engine has ended the request.",
    503: "Requests wait, and no step is made; or the server ends.",
}


def answers(model: type[BaseModel], *statuses: int, streamed: bool = False) -> dict[str, Any]:
    """What a route says of its answers: those that are right, and what else may come."""
    right: dict[str, Any] = {"model": model}
    if streamed:
        right["content"] = {"text/event-stream": {}}
    errors = {one: {"model": Error, "description": _WHY[one]} for one in (401, 429, *statuses)}
    return {"responses": {200: right, **errors}}
