"""What a client may ask, as the OpenAI API has it. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES = 16
MOST_TOPS = 20
DEFAULT_TOKENS = 16  # of a completion, as the OpenAI API has it

Ids = list[Annotated[int, Field(ge=0)]]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class StreamOptions(_Asked):
    include_usage: bool = False


class _Drawn(_Asked):
    """What both ways of asking share. top_k is our own: so many of the likeliest are drawn from."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None  # whose request it is: nothing depends on it


class Completion(_Drawn):
    prompt: str | Ids | list[str] | list[Ids]
    max_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOPS)] | None = None


class Part(_Asked):
    type: Literal["text"]
    text: str


class Message(_Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1)]

    def plain(self) -> dict[str, str]:
        """As templates know it: what developers say is the system's to them."""
        role = "system" if self.role == "developer" else self.role
        parts = [self.content] if isinstance(self.content, str) else [x.text for x in self.content]
        return {"role": role, "content": "".join(parts)}


class Schema(_Asked):
    name: str
    description: str | None = None
    strict: bool | None = None  # what comes is always of the schema
    shape: dict[str, Any] = Field(default_factory=dict, alias="schema")


class PlainText(_Asked):
    type: Literal["text"]


class JsonObject(_Asked):
    type: Literal["json_object"]


class JsonSchema(_Asked):
    type: Literal["json_schema"]
    json_schema: Schema


Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class Conversation(_Drawn):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOPS)] | None = None
    response_format: Format | None = None


class Text(_Asked):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class Tokens(_Asked):
    model: str | None = None
    tokens: Ids
