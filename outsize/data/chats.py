"""Chats as people have them, made messages as OpenAI has them: role, content, tool_calls.

Forms, told apart by the fields of a record:

- messages: {"messages": [{"role", "content"}], "tools"}, OpenAI's own, with calls of tools;
- sharegpt: {"conversations": [{"from", "value"}], "system", "tools"};
- completion: {"prompt", "completion"}, texts or lists of messages;
- alpaca: {"instruction", "input", "output", "system", "history"}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from outsize.errors import OutsizeError, nearest

Form = Literal["messages", "sharegpt", "completion", "alpaca"]
Message = Mapping[str, Any]
Record = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHAREGPT = "conversations"
# What ShareGPT's files and their kin call whom.
_SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant",
        "bot": "assistant", "model": "assistant", "bard": "assistant", "bing": "assistant",
        "tool_response": "tool", "observation": "tool", "function_response": "tool",
        "function_call": "assistant", "tool_call": "assistant",
    }
)  # fmt: skip
_CALLS = ("function_call", "tool_call")  # speakers whose value is a call as JSON
_ANSWERS = {"completion": ("completion", "response"), "alpaca": ("output", "response")}


@dataclass(frozen=True)
class Turns:
    """A chat that was checked. weights: of the assistant's messages, in order."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Asked:
    """What a model is to answer."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None


def form_of(record: Any, field: str = "messages") -> Form | None:
    """The form of a record, by its fields; None for one that is no chat. field: of messages."""
    if not isinstance(record, dict):
        return None
    has = {name for name, value in record.items() if value is not None}
    if field in has and _is_list(record[field]):
        return "messages"
    if _is_list(record.get(_SHAREGPT)):
        return "sharegpt"
    if "prompt" in has and has & {*_ANSWERS["completion"]}:
        return "completion"
    return "alpaca" if "instruction" in has and has & {*_ANSWERS["alpaca"]} else None


def turns_of(where: str, record: Any, field: str = "messages", form: Form | None = None) -> Turns:
    """A record as a chat; form: where it is known. OutsizeError for whatever is not one."""
    if not isinstance(record, dict):
        raise OutsizeError(f"{where}: expected a JSON object, found {type(record).__name__}")
    own = form or form_of(record, field)
    if own is None or (own == "messages" and field not in record):
        raise _no_chat(where, record, field)
    said = _said(where, _RAW[own](where, record, field))
    weights = tuple(weight for message, weight in said if message["role"] == "assistant")
    if not any(weights):
        what = "all messages of the assistant have weight 0" if weights else "no assistant message"
        raise OutsizeError(f"{where}: {what}; expected one to train on, or leave the chat out")
    return Turns(where, [message for message, _ in said], _tools(where, record), weights)


def asked_of(where: str, record: Record, form: Form) -> Asked:
    """What a record asks: its messages up to the answer at its end, which it need not have.
    OutsizeError for messages that are none, and where nothing is asked."""
    raw = _RAW[form](where, record, "messages")
    while raw and _speaker(raw[-1]) == "assistant":
        raw = raw[:-1]
    if not raw:
        raise OutsizeError(f"{where}: nobody asks anything; expected a message before the answer")
    return Asked([message for message, _ in _said(where, raw)], _tools(where, record))


def _speaker(message: Any) -> Any:
    return _renamed(dict(message)).get("role") if isinstance(message, dict) else None


def _said(where: str, raw: list[Any]) -> list[tuple[dict[str, Any], float]]:
    return [_message(f"{where}: message {i}", one) for i, one in enumerate(raw, start=1)]


def _no_chat(where: str, record: Record, field: str) -> OutsizeError:
    has = ", ".join(map(repr, record))[:120]
    if field in record:
        return OutsizeError(
            f"{where}: {field} is {_short(record[field])}; expected a list of messages"
        )
    return OutsizeError(
        f"{where}: no field {field!r} (fields: {has}); expected a chat,"
        f' {{"{field}": [{{"role": "user", "content": ...}}, ...]}}, conversations, prompt and'
        " completion, or instruction and output; data.chat.field names another field of messages"
    )


# -- forms -----------------------------------------------------------------------------------------


def _is_list(value: Any) -> bool:
    """Whether that is a list, or JSON that begins as one, as cells of CSV have it."""
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip()[:2] == "[{")


def _listed(where: str, record: Record, name: str) -> list[Any]:
    found = _parsed(record.get(name))
    if not isinstance(found, list) or not found:
        raise OutsizeError(f"{where}: {name} is {_short(found)}; expected a list of messages")
    return found


def _messages(where: str, record: Record, field: str) -> list[Any]:
    return _with_system(where, record, _listed(where, record, field))


def _sharegpt(where: str, record: Record, field: str) -> list[Any]:
    name = _SHAREGPT if _SHAREGPT in record else field
    return _with_system(where, record, _listed(where, record, name))


def _completion(where: str, record: Record, field: str) -> list[Any]:
    said = [
        _sided(record.get("prompt"), "user"),
        _sided(_answer(record, "completion"), "assistant"),
    ]
    return _with_system(where, record, [one for side in said for one in side])


def _sided(value: Any, role: str) -> list[Any]:
    """A text as a message, messages as they are."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _alpaca(where: str, record: Record, field: str) -> list[Any]:
    instruction, more = record.get("instruction"), record.get("input")
    if isinstance(instruction, str) and isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n\n{more}" if instruction.strip() else more
    history = record.get("history") or []
    if not all(isinstance(one, list) and len(one) == 2 for one in history):
        raise OutsizeError(f"{where}: history is {_short(history)}; expected pairs of texts")
    pairs = [*history, (instruction, _answer(record, "alpaca"))]
    roles = ("user", "assistant")
    said = [
        {"role": r, "content": text} for both in pairs for r, text in zip(roles, both, strict=True)
    ]
    return _with_system(where, record, said)


def _answer(record: Record, form: str) -> Any:
    return next((record[name] for name in _ANSWERS[form] if record.get(name) is not None), None)


def _with_system(where: str, record: Record, messages: list[Any]) -> list[Any]:
    """With what the record says as the system's message, where there is none. OutsizeError where
    there is one that says something else."""
    system = record.get("system")
    if not isinstance(system, str) or not system:
        return messages
    first = _renamed(dict(messages[0])) if messages and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise OutsizeError(
            f"{where}: the field system is {_short(system)}, and the first message is the system's"
            f" and says {_short(first.get('content'))}; expected one of them"
        )
    return messages


_RAW = {
    "messages": _messages, "sharegpt": _sharegpt, "completion": _completion, "alpaca": _alpaca,
}  # fmt: skip


# -- messages --------------------------------------------------------------------------------------


def _message(where: str, message: Any) -> tuple[dict[str, Any], float]:
    """A message without its weight, and that."""
    if not isinstance(message, dict):
        raise OutsizeError(
            f"{where} is {_short(message)}; expected an object with role and content"
        )
    said = _renamed({name: value for name, value in message.items() if value is not None})
    role, weight = said.get("role"), said.pop("weight", None)
    if role not in ROLES:
        raise OutsizeError(f"{where} has the role {_short(role)}{nearest(str(role), ROLES)}")
    calls = _calls(where, said)
    said["content"] = _text(where, said.get("content"), calls)
    if role != "assistant":
        if weight is not None:
            raise OutsizeError(f"{where} is the {role}'s and has a weight; only the assistant's do")
        return said, 0.0
    if not calls and not said["content"].strip():
        raise OutsizeError(f"{where} is the assistant's and empty; expected what it should say")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and math.isfinite(weight) and weight >= 0):
        raise OutsizeError(
            f"{where} has the weight {_short(weight)}; expected a finite number, 0 or more"
        )
    return said, 1.0 if weight is None else float(weight)


def _renamed(said: dict[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT's with OpenAI's names; one of OpenAI's as it is."""
    if "role" not in said and "from" in said:
        said["role"] = said.pop("from")
    if "content" not in said and "value" in said:
        said["content"] = said.pop("value")
    speaker = said.get("role")
    if isinstance(speaker, str) and speaker not in ROLES:
        said["role"] = _SPEAKERS.get(speaker.lower(), speaker)
        if speaker in _CALLS and isinstance(said.get("content"), str):
            said["tool_calls"] = [{"type": "function", "function": said.pop("content")}]
    return said


def _calls(where: str, said: dict[str, Any]) -> bool:
    """Whether tools are called; calls become what templates read: arguments as an object."""
    old = said.pop("function_call", None)
    raw = said.pop("tool_calls", None) or ([{"type": "function", "function": old}] if old else [])
    if not raw:
        return False
    if not isinstance(raw, list):
        raise OutsizeError(f"{where} has the tool_calls {_short(raw)}; expected a list of calls")
    said["tool_calls"] = [_call(where, one) for one in raw]
    return True


def _call(where: str, call: Any) -> dict[str, Any]:
    own = dict(call) if isinstance(call, dict) else {}
    function = _parsed(own.get("function", own))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise OutsizeError(
            f"{where} has the call {_short(call)}; expected a function with its name and arguments"
        )
    arguments = _parsed(function.get("arguments"))
    function = {**function, "arguments": {} if arguments is None else arguments}
    rest = {name: own[name] for name in ("id", "index") if own.get(name) is not None}
    return {"type": "function", **rest, "function": function}


def _parsed(value: Any) -> Any:
    """What a text of JSON says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(where: str, content: Any, calls: bool) -> str | None:
    """The text of a message: of parts, those of text, a line each. A call needs none."""
    if content is None and calls:
        return None
    if isinstance(content, list) and content:
        parts = [one.get("text") if isinstance(one, dict) else one for one in content]
        kinds = {one.get("type", "text") for one in content if isinstance(one, dict)} - {"text"}
        if kinds:
            raise OutsizeError(
                f"{where} has content of the type {min(map(str, kinds))!r}; expected text alone"
            )
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            content = "\n".join(texts)
    if not isinstance(content, str):
        raise OutsizeError(f"{where} has the content {_short(content)}; expected a string")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise OutsizeError(f"{where} holds half a surrogate pair; expected text") from None
    return content


def _tools(where: str, record: Record) -> list[Any] | None:
    """The tools of a chat, a list or JSON of one."""
    found = _parsed(record.get("tools") or None)
    if isinstance(found, list):
        found = [_parsed(one) for one in found]
    if found is not None and not (
        isinstance(found, list) and all(isinstance(t, dict) for t in found)
    ):
        raise OutsizeError(f"{where}: tools is {_short(found)}; expected a list of tools")
    return found or None


def _short(value: Any) -> str:
    return repr(value)[:60]
