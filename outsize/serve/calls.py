"""How a model calls tools: as its own template writes calls, found by rendering some.

A template that writes a call as a JSON object with a name and its arguments says everything: what
stands before the first call, between two, behind the last. Answers are held to that form by a
grammar, so that what is called is always a tool that was offered, with arguments of its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.data.chats import Message
from outsize.data.template import Template
from outsize.errors import OutsizeError

SAID = "It is so."  # what templates are tried on, beside QUESTION
_NAMES, _IDS = ("lookfirst", "looknext"), ("a1b2c3d4e", "f5g6h7i8j")
_KEYS = ("arguments", "parameters")
WHERE = "the conversation"  # in what a template says is wrong
_SPACES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ",
                          "key_separator": ": "}}  # fmt: skip  # as templates write JSON
_LITERAL = json.dumps  # of Lark's grammars


@dataclass(frozen=True)
class Call:
    """arguments: JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallForm:
    """What a template writes: `begin`, a call, `between` and another as often as there are more,
    `end`. A call is `head`, its name, `middle`, the arguments as JSON, `tail`; in tail `id` stands
    for what the model may choose, "" where there is none. several: whether one answer may have
    more than one."""

    begin: str
    between: str
    end: str
    head: str
    middle: str
    tail: str
    id: str
    several: bool

    def grammar(
        self,
        tools: dict[str, dict[str, Any]],
        must: bool,
        several: bool,
        special: dict[str, int],
    ) -> str:
        """Of llguidance, in Lark. tools: the schema of each one's arguments; must: the answer is
        a call, else it may be any text, or begin as one; special: ids of special tokens."""
        own = [f"call_{i}: {self._call(*one)}" for i, one in enumerate(tools.items())]
        any_one = " | ".join(f"call_{i}" for i in range(len(tools)))
        more = ""
        if several and self.several:
            more = f" ({_written(self.between, special)} call)*"
        end = _written(self.end, special)
        calls = f"call{more} {end}"
        rules = ["%llguidance {}"]
        if must:
            rules += [f"start: {_written(self.begin, special)} {calls}"]
        elif not self.begin:
            rules += [f"start: {calls} | OTHER?", f"OTHER: /[^{self.head[0]}](.|\\n)*/"]
        elif any(self.begin.startswith(one) for one in special):
            rules += [f"start: TEXT | TEXT {_written(self.begin, special)} {calls}",
                      r"TEXT: /(.|\n)*/"]  # fmt: skip
        else:
            rules += [
                f"start: TEXT | trigger {calls}",
                f"trigger[lazy]: TEXT {_written(self.begin, special)}",
                r"TEXT: /(.|\n)*/",
            ]
        return "\n".join([*rules, f"call: {any_one}", *own, ""])

    def _call(self, name: str, schema: dict[str, Any]) -> str:
        head = _LITERAL(self.head + json.dumps(name)[1:-1] + self.middle)
        tail = _LITERAL(self.tail)
        if self.id:
            before, _, behind = self.tail.partition(self.id)
            tail = f"{_LITERAL(before)} /[a-zA-Z0-9]{{{len(self.id)}}}/ {_LITERAL(behind)}"
        return f"{head} %json {json.dumps({**schema, **_SPACES})} {tail}"

    def calls(self, written: str) -> list[Call]:
        """Those in an answer, special tokens written out; what is cut off is none."""
        begun = self.begun(written)
        if begun is None:
            return []
        found, at, between = list[Call](), begun[1], _spaced(self.between)
        while (one := _call_at(written, at)) is not None:
            call, at = one
            found.append(call)
            more = between.match(written, at)
            if more is None:
                break
            at = more.end()
        return found

    def begun(self, written: str) -> tuple[int, int] | None:
        """Where a call begins in an answer, and its JSON."""
        if not self.begin:
            return (0, 0) if written.startswith(self.head) else None
        found = _spaced(self.begin).search(written)
        return None if found is None else found.span()


def _spaced(text: str) -> re.Pattern[str]:
    """A text, whatever space a tokenizer puts between its words."""
    return re.compile(r"\s*".join(["", *map(re.escape, text.split()), ""]))


def _call_at(written: str, at: int) -> tuple[Call, int] | None:
    try:
        said, end = json.JSONDecoder().raw_decode(written, at)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    given = [said[key] for key in _KEYS if key in said]
    return None if not given else (Call(said["name"], json.dumps(given[0])), end)


def _written(text: str, special: dict[str, int]) -> str:
    """A text as a grammar has it: special tokens by their ids."""
    parts, at = list[str](), 0
    while at < len(text):
        first = [(text.find(one, at), one) for one in special if text.find(one, at) >= 0]
        where, one = min(first, key=lambda x: (x[0], -len(x[1])), default=(len(text), ""))
        parts += [_LITERAL(text[at:where])] if where > at else []
        parts += [f"<[{special[one]}]>"] if one else []
        at = where + len(one)
    return " ".join(parts)


def form_of(template: Template) -> CallForm:
    """How a template writes calls. OutsizeError where it has no place for tools, or writes calls
    otherwise than as JSON."""
    writing = _Writing(template)
    plain = writing(None)
    if writing.asking(tools=True) == writing.asking(tools=False):
        raise OutsizeError(f"tools: the chat template of {template.name} has no place for them")
    one = writing(_NAMES[:1])
    start = _alike(one, plain)
    asked = writing.asking(tools=True)
    start = len(asked) if one.startswith(asked) else start
    body = _between(one, start, _behind(one, plain, start))
    spans = _spans(body, _NAMES[:1])
    if not spans:
        raise OutsizeError(
            f"tools: the chat template of {template.name} does not write calls as JSON objects"
            f" with a name and {' or '.join(_KEYS)}"
        )
    (at, to), said = spans[0], body
    between = _two(writing, start)
    head, rest = said[at:to].split(_NAMES[0], 1)
    middle, tail = rest.split(json.dumps(_arguments(_NAMES[0])), 1)
    return CallForm(
        body[:at], between or "", body[to:], head, middle, tail,
        _IDS[0] if _IDS[0] in tail else "", between is not None,
    )  # fmt: skip


def _two(writing: Callable[[Sequence[str] | None], str], start: int) -> str | None:
    """What stands between two calls; None where a template takes one alone."""
    try:
        spans = _spans(both := writing(_NAMES)[start:], _NAMES)
    except OutsizeError:
        return None
    return both[spans[0][1] : spans[1][0]] if len(spans) == 2 else None


def _spans(written: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """Where the calls of names are, if all are there as JSON objects."""
    found = list[tuple[int, int]]()
    for name in names:
        at = written.find("{", found[-1][1] if found else 0)
        while at >= 0:
            one = _call_at(written, at)
            if one is not None and one[0] == Call(name, json.dumps(_arguments(name))):
                found.append((at, one[1]))
                break
            at = written.find("{", at + 1)
    return found if len(found) == len(names) else []


def _between(written: str, start: int, behind: int) -> str:
    return written[start : len(written) - behind]


def _behind(one: str, plain: str, start: int) -> int:
    """Characters that end both turns."""
    return _alike(one[start:][::-1], plain[start:][::-1])


def _alike(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _arguments(name: str) -> dict[str, str]:
    return {"word": f"of {name}"}


class _Writing:
    """A conversation by a template whose answer is a text, or calls of tools by name."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def __call__(self, names: Sequence[str] | None) -> str:
        said: dict[str, Any] = {"role": "assistant", "content": SAID}
        if names is not None:
            calls = [
                {"id": ident, "type": "function",
                 "function": {"name": name, "arguments": _arguments(name)}}
                for name, ident in zip(names, _IDS, strict=False)
            ]  # fmt: skip
            said = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._rendered([QUESTION, said], True, False)

    def asking(self, tools: bool) -> str:
        return self._rendered([QUESTION], tools, True)

    def _rendered(self, messages: Sequence[Message], tools: bool, prompt: bool) -> str:
        offered = [_tool(one) for one in _NAMES] if tools else None
        return self._template.render(WHERE, messages, offered, prompt)[0]


QUESTION: Message = {"role": "user", "content": "Is it so?"}


def _tool(name: str) -> dict[str, Any]:
    word = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    return {"type": "function", "function": {"name": name, "description": name,
                                             "parameters": word}}  # fmt: skip
