"""What a client may ask, as the OpenAI API has it. A field that is not here is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outsize.errors import OutsizeError

MOST_CHOICES = 16
MOST_PROMPTS = 2048  # of a request, and texts of one that embeds
MOST_BIASES = 65_536
_MOST_FIELDS = 256  # of an object, more than any has
MOST_TOPS = 20
DEFAULT_TOKENS = 16  # of a completion, as the OpenAI API has it

# The first that is wrong in a list is said: a body of millions is as soon refused as any.
Id = Annotated[int, Field(ge=0)]
Ids = Annotated[list[Id], Field(fail_fast=True, min_length=1)]
_Many = Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
Several = Annotated[list[str], _Many] | Annotated[list[Ids], _Many]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Stop = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]


def _or(default: Any, kind: Any) -> BeforeValidator:
    """null is what nothing is, as the OpenAI API has it."""
    return BeforeValidator(
        lambda given: default if given is None else given, json_schema_input_type=kind | None
    )


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"logit_bias: {len(biases):,} tokens; expected at most {MOST_BIASES:,}")
    return biases


Biases = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise ValueError(f"the body: an object of {len(given):,} fields; expected those of the"
                             " document, /openapi.json")  # fmt: skip
        return given


class StreamOptions(_Asked):
    include_usage: bool = False


class _Drawn(_Asked):
    """What both ways of asking share. top_k is our own: so many of the likeliest are drawn from."""

    model: str | None = None
    temperature: Annotated[Temperature, _or(1.0, Temperature)] = 1.0
    top_p: Annotated[TopP, _or(1.0, TopP)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[Choices, _or(1, Choices)] = 1
    stream: Annotated[bool, _or(False, bool)] = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Annotated[Penalty, _or(0.0, Penalty)] = 0.0
    frequency_penalty: Annotated[Penalty, _or(0.0, Penalty)] = 0.0
    logit_bias: Biases | None = None
    user: str | None = None  # whose request it is: nothing depends on it

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: without stream; expected both or neither")
        return self


class Completion(_Drawn):
    prompt: str | Ids | Several
    max_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_TOKENS
    echo: Annotated[bool, _or(False, bool)] = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOPS)] | None = None


class Part(_Asked):
    type: Literal["text"]
    text: str


class Called(_Asked):
    name: str
    arguments: str


class ToolCall(_Asked):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


Content = str | Annotated[list[Part], Field(fail_fast=True, min_length=1)]


def _text(content: Content | None) -> str:
    if isinstance(content, list):
        return "".join(one.text for one in content)
    return content or ""


class Said(_Asked):
    role: Literal["system", "developer", "user"]
    content: Content

    def plain(self) -> dict[str, Any]:
        """As templates know it: what developers say is the system's to them."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _text(self.content)}


class Answered(_Asked):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, min_length=1)] | None = None
    refusal: None = None  # clients send answers back as they came

    def plain(self) -> dict[str, Any]:
        """As templates know it: arguments are an object. OutsizeError for what is none."""
        made: dict[str, Any] = {"role": self.role, "content": _text(self.content)}
        if self.tool_calls:
            made["tool_calls"] = [_called(one) for one in self.tool_calls]
        return made


class Result(_Asked):
    role: Literal["tool"]
    content: Content
    tool_call_id: str

    def plain(self) -> dict[str, Any]:
        said = _text(self.content)
        return {"role": self.role, "content": said, "tool_call_id": self.tool_call_id}


Message = Annotated[Said | Answered | Result, Field(discriminator="role")]


def _called(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise OutsizeError(
            f"messages: the call of {call.function.name} has the arguments"
            f" {call.function.arguments[:80]!r}; expected JSON of an object"
        )
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function",
            "function": {"name": call.function.name, "arguments": arguments}}  # fmt: skip


class Function(_Asked):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None  # what comes is always of the schema


class Tool(_Asked):
    type: Literal["function"]
    function: Function


class FunctionName(_Asked):
    name: str


class ToolChoice(_Asked):
    type: Literal["function"]
    function: FunctionName


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
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[bool, _or(False, bool)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOPS)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _tools(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: without logprobs; expected logprobs true beside it")
        names = [one.function.name for one in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"tools: the name {max(names, key=names.count)} comes twice")
        wanted = self.tool_choice
        if isinstance(wanted, ToolChoice) and wanted.function.name not in names:
            raise ValueError(f"tool_choice: {wanted.function.name} is none of the tools")
        if wanted == "required" and not names:
            raise ValueError("tool_choice: required, without tools")
        shaped = self.response_format is not None and self.response_format.type != "text"
        if shaped and self.offered:
            raise ValueError('response_format: with tools; expected tool_choice "none" beside it')
        return self

    @property
    def offered(self) -> list[Tool]:
        """What may be called."""
        wanted = self.tool_choice
        if isinstance(wanted, ToolChoice):
            return [x for x in self.tools or () if x.function.name == wanted.function.name]
        return [] if wanted == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")


class Embedding(_Asked):
    model: str | None = None
    input: Annotated[str, Field(min_length=1)] | Ids | Several
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None  # whose request it is: nothing depends on it


class Text(_Asked):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class Tokens(_Asked):
    model: str | None = None
    tokens: Annotated[list[Id], Field(fail_fast=True)]
